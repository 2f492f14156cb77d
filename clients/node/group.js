// A group of environments that step together, and the rows that they write: everything that
// docs/wire-protocol.md says under "Rows" is here.
import { makeEnvironments } from './environments.js';

const FIRST = 0, MID = 1, LAST = 2;
const ARRAYS = { // by the dtype of a spec
  DTYPE_INT8: Int8Array, DTYPE_UINT8: Uint8Array, DTYPE_INT64: BigInt64Array, DTYPE_FLOAT32: Float32Array,
};
const NUMBERS = (dtype, shape = []) => ({ dtype, shape });

export class Group {
  // reply: the JoinReply. Throws an Error if its specs are not those of the environments here.
  constructor(reply, agent, numEnvs, random) {
    this.agent = agent;
    this.numEnvs = numEnvs;
    this.length = reply.unroll_length;
    this.environments = makeEnvironments(reply.settings.tasks[0].environment, numEnvs, random);
    this.specs = reply.unroll_specs;
    this.checkSpecs();
    this.episodes = this.environments.map(() => ({ episode_return: 0, length: 0, frames: 0 }));
    this.ended = this.environments.map(() => false);
    this.arrays = this.allocate();
    // The reset, as if it were row T of an unroll before: no output led to it.
    this.environments.forEach((environment, env) => {
      environment.reset();
      this.write(this.length, env, { step_type: FIRST, reward: 0, discount: 1 });
    });
  }

  // Acts T steps with one version of the parameters. Returns what a message says of them.
  play(parameters) {
    const before = this.arrays;
    this.arrays = this.allocate();
    for (const spec of this.specs) {
      const [rowsBefore, rows] = [before[spec.name], this.arrays[spec.name]];
      rows.set(rowsBefore.subarray(rowsBefore.length - rows.length / (this.length + 1))); // row 0 is row T
    }
    const frames = new Array(this.numEnvs).fill(0);
    const episodes = [];
    for (let row = 1; row <= this.length; row++) {
      const outputs = this.agent.compute(parameters, this.row('timestep/observation', row - 1), this.numEnvs);
      this.row('output/policy', row).set(outputs.policy);
      this.row('output/baseline', row).set(outputs.baseline);
      for (let env = 0; env < this.numEnvs; env++) {
        const action = this.agent.act(parameters, this.of('output/policy', row, env));
        const { isSeam, ended } = this.step(row, env, action);
        frames[env] += isSeam ? 0 : 1;
        if (ended) episodes.push(ended);
      }
    }
    return { parameters, num_envs: this.numEnvs, frames, episodes, arrays: this.arrays };
  }

  // Takes one step of one environment. After the end of an episode it is the seam: the action is
  // ignored, and the first observation of the next episode is what follows.
  step(row, env, action) {
    const environment = this.environments[env];
    const actions = this.of('output/action', row, env);
    actions.set(actions instanceof BigInt64Array ? action.map(BigInt) : action);
    if (this.ended[env]) {
      this.ended[env] = false;
      environment.reset();
      this.write(row, env, { step_type: FIRST, reward: 0, discount: 1 });
      return { isSeam: true };
    }
    const { reward, terminated, truncated } = environment.step(action);
    this.ended[env] = terminated || truncated;
    this.write(row, env, { step_type: this.ended[env] ? LAST : MID, reward, discount: terminated ? 0 : 1 });
    const episode = this.episodes[env];
    episode.episode_return += reward;
    episode.length += 1;
    episode.frames += 1;
    if (!this.ended[env]) return { isSeam: false };
    this.episodes[env] = { episode_return: 0, length: 0, frames: 0 };
    return { isSeam: false, ended: episode };
  }

  write(row, env, timestep) {
    for (const [name, value] of Object.entries(timestep)) this.of(`timestep/${name}`, row, env)[0] = value;
    this.environments[env].observe(this.of('timestep/observation', row, env));
  }

  // Row t of a leaf, [E, ...], as a part of its array [T + 1, E, ...].
  row(name, t) {
    const size = this.arrays[name].length / (this.length + 1);
    return this.arrays[name].subarray(t * size, (t + 1) * size);
  }

  // The numbers of one environment in it.
  of(name, t, env) {
    const row = this.row(name, t);
    const size = row.length / this.numEnvs;
    return row.subarray(env * size, (env + 1) * size);
  }

  allocate() {
    const sized = ({ name, dtype, shape }) => [name, new ARRAYS[dtype](product(shape) * this.numEnvs)];
    return Object.fromEntries(this.specs.map(sized));
  }

  checkSpecs() {
    const [{ observation, action }] = this.environments;
    const parameters = this.agent.factors.reduce((sum, factor) => sum + factor.num_parameters, 0);
    const ours = {
      'timestep/observation': observation,
      'timestep/reward': NUMBERS('DTYPE_FLOAT32'),
      'timestep/discount': NUMBERS('DTYPE_FLOAT32'),
      'timestep/step_type': NUMBERS('DTYPE_INT8'),
      'output/action': action,
      'output/policy': NUMBERS('DTYPE_FLOAT32', [parameters]),
      'output/baseline': NUMBERS('DTYPE_FLOAT32'),
    };
    const told = (specs) => specs.map(({ name, dtype, shape }) => `${name} ${dtype} [${shape}]`).join(', ');
    const expected = Object.entries(ours).map(([name, { dtype, shape }]) => {
      return { name, dtype, shape: [this.length + 1, ...shape] };
    });
    if (told(expected) !== told(this.specs)) {
      throw new Error(`The learner's unrolls are ${told(this.specs)}; this actor makes ${told(expected)}.`);
    }
  }
}

function product(numbers) {
  return numbers.reduce((result, number) => result * number, 1);
}
