// The agent that JoinReply describes: from observations to outputs of the network to actions.
// Of all layers and families that a learner may describe it computes those of an MLP with a
// categorical policy or a squashed Gaussian one, and refuses others.

// Each layer maps [E, n] to [E, m], both Float32Array, rows one behind the other.
const LAYERS = {
  KIND_FLATTEN: (x) => x, // observations are flat already
  KIND_RELU: (x) => x.map((value) => Math.max(value, 0)),
  KIND_LINEAR: (x, numEnvs, [bias, weights]) => {
    const [inputs, outputs] = [x.length / numEnvs, bias.length];
    const y = new Float32Array(numEnvs * outputs);
    for (let env = 0; env < numEnvs; env++) {
      const row = y.subarray(env * outputs, (env + 1) * outputs);
      row.set(bias);
      for (let i = 0; i < inputs; i++) {
        const value = x[env * inputs + i];
        if (value === 0) continue; // most of a board, and half of what a RELU lets through
        for (let o = 0, w = i * outputs; o < outputs; o++, w++) row[o] += value * weights[w];
      }
    }
    return y;
  },
};

// Each family turns parameters into the numbers of one leaf of an action.
const FAMILIES = {
  FAMILY_CATEGORICAL: {
    sample(parameters, factor, space, random) {
      let first = 0;
      return space.n.map((n, number) => {
        const logits = parameters.subarray(first, first + Number(n));
        first += Number(n);
        return Number(space.start[number]) + chosen(logits, random);
      });
    },
  },
  FAMILY_TANH_NORMAL: {
    sample(parameters, factor, space, random) {
      const size = parameters.length / 2;
      const [low, high] = [factor.lowest_log_deviation, factor.highest_log_deviation];
      return Array.from({ length: size }, (_, i) => {
        const share = 1 / (1 + Math.exp(-(parameters[size + i] + Math.log(-low / high))));
        const deviation = Math.exp(low + (high - low) * share);
        return inBox(space, i, Math.tanh(parameters[i] + deviation * normal(random)));
      });
    },
  },
};

export class Agent {
  // Throws an Error if `reply`, a JoinReply, describes what this agent does not compute.
  constructor(reply, random) {
    const { network, policy, action_space } = reply;
    if (network.not_described) throw new Error(`${network.not_described} is a part of somebody's own.`);
    const kinds = [...network.shared, ...network.policy, ...network.baseline].map(({ kind }) => kind);
    refuse('layer', kinds, LAYERS);
    refuse('policy', policy.factors.map(({ family }) => family), FAMILIES);
    refuse('input', network.inputs.map(({ kind }) => kind), { KIND_NUMBERS: true });
    if (policy.mask || network.inputs.length !== 1 || network.inputs[0].frames > 1) {
      throw new Error('This actor serves one array of numbers as observation, without mask and frame stack.');
    }
    this.network = network;
    this.factors = policy.factors.map((factor) => ({
      ...factor,
      space: action_space.find(({ name }) => name === factor.action),
    }));
    this.randomWarmUp = reply.settings.agent.random_warm_up;
    this.random = random;
  }

  // observations: [E, ...] of numbers. Returns the network's outputs for them, which are the parameters
  // of the policy as well: {policy: [E, P], baseline: [E]}.
  compute(parameters, observations, numEnvs) {
    const apply = (layers, x) =>
      layers.reduce((y, layer) => {
        return LAYERS[layer.kind](y, numEnvs, layer.parameters.map((i) => parameters.tensors[i]));
      }, x);
    const { scale } = this.network.inputs[0];
    const shared = apply(this.network.shared, Float32Array.from(observations, (x) => x * scale));
    return { policy: apply(this.network.policy, shared), baseline: apply(this.network.baseline, shared) };
  }

  // policy: [P] of one environment. Returns the numbers of its action.
  act(parameters, policy) {
    let first = 0;
    return this.factors.flatMap((factor) => {
      const own = policy.subarray(first, (first += factor.num_parameters));
      if (this.randomWarmUp && parameters.version === 0n && factor.family === 'FAMILY_TANH_NORMAL') {
        const points = Array.from({ length: own.length / 2 }, () => 2 * this.random() - 1);
        return points.map((point, i) => inBox(factor.space, i, point));
      }
      return FAMILIES[factor.family].sample(own, factor, factor.space, this.random);
    });
  }
}

function refuse(what, named, known) {
  const unknown = named.filter((name) => !(name in known));
  if (unknown.length) throw new Error(`The ${what} ${unknown[0]} is not known here: add it to agent.js.`);
}

// Draws one of n choices from their logits.
function chosen(logits, random) {
  const largest = Math.max(...logits);
  const weights = Array.from(logits, (logit) => Math.exp(logit - largest));
  let left = random() * weights.reduce((sum, weight) => sum + weight, 0);
  const choice = weights.findIndex((weight) => (left -= weight) < 0);
  return choice < 0 ? weights.lastIndexOf(Math.max(...weights)) : choice; // by rounding, nothing was left
}

// Draws from the normal distribution (Box and Muller 1958).
function normal(random) {
  return Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
}

// Takes a point of (-1, 1) to number i of a box.
function inBox({ low, high }, i, point) {
  const [least, most] = [low, high].map((bounds) => bounds[bounds.length > 1 ? i : 0]);
  return (most + least) / 2 + ((most - least) / 2) * point;
}
