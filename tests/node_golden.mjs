// Computes golden networks with the agent of clients/node: cases on stdin, answers on stdout.
import { readFileSync } from 'node:fs';
import { Agent } from '../clients/node/agent.js';

const product = (shape) => shape.reduce((result, n) => result * n, 1);

// As impala/conform/golden.py has it.
function parameter(number, shape) {
  const scale = 1 / Math.sqrt(Math.max(1, product(shape.slice(0, -1))));
  return Float32Array.from({ length: product(shape) }, (_, j) => scale * Math.sin(1 + number + 0.7 * j));
}

const answers = {};
for (const { name, reply, observation, step_type: rows } of JSON.parse(readFileSync(0, 'utf8'))) {
  // JSON leaves out what is empty; a message that was received does not.
  const { network, policy } = reply;
  const layers = (list) => (list ?? []).map((layer) => ({ parameters: [], ...layer }));
  for (const part of ['shared', 'policy', 'baseline']) network[part] = layers(network[part]);
  try {
    const agent = new Agent({ settings: { agent: {} }, ...reply, network, policy: { mask: '', ...policy } }, Math.random);
    const tensors = reply.parameter_specs.map(({ shape = [] }, i) => parameter(i, shape));
    const seen = Object.values(observation)[0].flat(9);
    const { policy: outputs, baseline } = agent.compute({ tensors }, seen, rows.length);
    const width = outputs.length / rows.length;
    answers[name] = {
      policy: rows.map((_, row) => [...outputs.slice(row * width, (row + 1) * width)]),
      baseline: [...baseline],
    };
  } catch (error) {
    answers[name] = { error: error.message };
  }
}
console.log(JSON.stringify(answers));
