// Lets the search run where the pages are opened from a folder: browsers refuse workers there
// ("file:"), so the worker's script runs in a hidden frame instead.  The theme would take such a
// script from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame;
      this.waiting = [];
      const inside = frame.contentWindow;
      frame.contentDocument.open();
      frame.contentDocument.write("<!doctype html><body></body>");
      frame.contentDocument.close();
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      // What the script awaits; languages other than English, which this site does not have, need it.
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      this.load(url).then(() => {
        this.waiting.forEach((data) => this.tell(data));
        this.waiting = null;
      });
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.frame.contentDocument.body.appendChild(script);
      });
    }

    tell(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.tell(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
