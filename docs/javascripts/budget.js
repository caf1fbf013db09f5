"use strict";

// The arithmetic of docs/choosing-a-budget.md ("The sum of what must be there"), in bytes.  A test
// compares it with the tables of that page, and the multiples with PyTorch's own optimizers.

// Bytes for each byte of trained parameters: `state` from the first step on; `temporaries` only
// inside of step(), with the default of CUDA (foreach=True) and with fused=True, where there is one.
const OPTIMIZERS = {
  "sgd": { label: "SGD", state: 0, foreach: 0, fused: 0 },
  "sgd-momentum": { label: "SGD with momentum", state: 1, foreach: 0, fused: 0 },
  "rmsprop": { label: "RMSprop", state: 1, foreach: 1, fused: null },
  "adagrad": { label: "Adagrad", state: 1, foreach: 2, fused: 0 },
  "adam": { label: "Adam, AdamW", state: 2, foreach: 1, fused: 0 },
  "adam-amsgrad": { label: "Adam, AdamW with amsgrad", state: 3, foreach: 1, fused: 0 },
};

/**
 * What must be there whatever the plan is, and what it leaves.
 *
 * @param {object} given
 * @param {number} given.trained parameters that get a gradient
 * @param {number} given.frozen parameters that do not
 * @param {number} given.parameterBytes of one parameter
 * @param {number} given.gradientBytes of one gradient
 * @param {string} given.optimizer a key of OPTIMIZERS
 * @param {boolean} given.fused whether the optimizer is built with fused=True
 * @param {number} given.deviceBytes memory that PyTorch sees
 * @param {number} given.asideBytes of it, what neither the model nor the optimizer can have
 * @returns {object} bytes by name, and whether a step can fit
 */
function budgetFor(given) {
  const optimizer = OPTIMIZERS[given.optimizer];
  const trainedBytes = given.trained * given.parameterBytes;
  const parameters = trainedBytes + given.frozen * given.parameterBytes;
  const gradients = given.trained * given.gradientBytes;
  const state = trainedBytes * optimizer.state;
  const multiple = given.fused && optimizer.fused !== null ? optimizer.fused : optimizer.foreach;
  const temporaries = trainedBytes * multiple;
  const budget = given.deviceBytes - given.asideBytes;
  const sum = parameters + gradients + state;
  return {
    parameters,
    gradients,
    state,
    temporaries,
    sum,
    // For the whole step, with the option `optimizer`.
    budget,
    // For forward and backward alone, without it.
    budgetOfGraphs: budget - state,
    // For inputs, activations and temporaries, while the graphs run.
    left: budget - sum,
    // In optimizer.step(), where there are no activations.
    leftInStep: budget - sum - temporaries,
    fits: budget - sum > 0 && budget - sum - temporaries >= 0,
  };
}

if (typeof module !== "undefined") module.exports = { OPTIMIZERS, budgetFor };
