"use strict";

// The form of docs/budget-calculator.md; its arithmetic is in budget.js.
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("calculator-form");
  if (!form) return;
  const GIB = 2 ** 30;

  const select = form.elements.optimizer;
  for (const [key, { label }] of Object.entries(OPTIMIZERS)) {
    select.add(new Option(label, key, key === "adam", key === "adam"));
  }

  const show = (name, bytes) => {
    form.elements[name].value = `${(bytes / GIB).toFixed(1)} GiB`;
  };

  const update = () => {
    const number = (name) => Math.max(0, Number(form.elements[name].value) || 0);
    const found = budgetFor({
      trained: number("trained") * 1e9,
      frozen: number("frozen") * 1e9,
      parameterBytes: number("parameter_bytes"),
      gradientBytes: number("gradient_bytes"),
      optimizer: select.value,
      fused: form.elements.fused.checked,
      deviceBytes: number("device") * GIB,
      asideBytes: number("aside") * GIB,
    });
    const names = ["parameters", "gradients", "state", "sum", "temporaries", "budget"];
    names.forEach((name) => show(name, found[name]));
    show("budget_of_graphs", found.budgetOfGraphs);
    show("left", found.left);
    const gib = (bytes) => (bytes / GIB).toFixed(1);
    let verdict = `${gib(found.left)} GiB are left for inputs and for what the step computes.`;
    if (found.left <= 0) {
      verdict =
        `This cannot be trained in the usual loop, whatever is recomputed: parameters, gradients` +
        ` and state exceed the budget by ${gib(-found.left)} GiB.`;
    } else if (!found.fits) {
      verdict =
        `The graphs may fit, but optimizer.step() exceeds the budget by` +
        ` ${gib(-found.leftInStep)} GiB: its temporaries take ${gib(found.temporaries)} GiB.` +
        (OPTIMIZERS[select.value].fused === null ? "" : " With fused=True it makes none.");
    }
    form.elements.verdict.value = verdict;
  };

  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
});
