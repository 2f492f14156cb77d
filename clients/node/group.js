// Environments that step together, and the rows that they write: everything that
// docs/wire-protocol.md says under "Rows" is here. A row is an object of Buffers, by the names of
// unroll_specs: the bytes of all environments, [E, ...].
import { Catch } from './catch.js';

const FIRST = 0, MID = 1, LAST = 2;
const OBSERVATION = 'timestep/observation', STEP_TYPE = 'timestep/step_type', ACTION = 'output/action';
const BYTES = { DTYPE_UINT8: 1, DTYPE_INT8: 1, DTYPE_INT64: 8, DTYPE_FLOAT32: 4 };

export class Group {
  // reply: the JoinReply. Throws an Error if it is for other environments than those here.
  constructor(reply, numEnvs) {
    const { id, kwargs } = JSON.parse(reply.settings).tasks[0].environment;
    if (id !== 'Catch' || kwargs !== '{}') throw new Error(`The learner plays ${id} ${kwargs}, this actor Catch.`);
    this.environments = Array.from({ length: numEnvs }, () => new Catch());
    this.numEnvs = numEnvs;
    this.length = reply.unroll_length;
    this.specs = reply.unroll_specs.filter(({ name }) => !name.startsWith('core_state'));
    this.outputs = this.specs.map(({ name }) => name).filter((name) => name.startsWith('output/'));
    const zeros = ({ dtype, shape }) => Buffer.alloc(BYTES[dtype] * numEnvs * shape.reduce((a, b) => a * b, 1));
    // The agent's memory, which is zeros at first.
    this.state = reply.unroll_specs.slice(this.specs.length).map(zeros);
    // The reset, as if it were row T of an unroll before: no output led to it.
    const ofRow = this.specs.map(({ name, dtype, shape }) => [name, zeros({ dtype, shape: shape.slice(1) })]);
    this.last = { ...Object.fromEntries(ofRow), ...this.timesteps((env) => this.begin(env)) };
    this.ended = this.environments.map(() => false);
    this.episodes = this.environments.map(newEpisode);
  }

  // Plays T steps. act(row) resolves to the ActReply to an ActRequest. Returns what a message says of the
  // unroll, or null if training has ended.
  async play(act) {
    const rows = [this.last]; // row 0 is row T of the unroll before
    const before = this.state;
    const frames = new Array(this.numEnvs).fill(0);
    const episodes = [];
    let said;
    for (let row = 1; row <= this.length; row++) {
      const given = [this.last[OBSERVATION], this.last[STEP_TYPE], ...this.state];
      said = await act({ begins: row === 1, num_envs: this.numEnvs, tensors: given });
      if (said.finished) return null;
      this.state = said.tensors.slice(this.outputs.length);
      const outputs = Object.fromEntries(this.outputs.map((name, i) => [name, said.tensors[i]]));
      const timesteps = this.timesteps((env) => {
        if (this.ended[env]) { // the seam: the action is ignored
          this.ended[env] = false;
          return this.begin(env);
        }
        frames[env] += 1;
        return this.step(env, Number(outputs[ACTION].readBigInt64LE(8 * env)), episodes);
      });
      this.last = { ...timesteps, ...outputs };
      rows.push(this.last);
    }
    const tensors = this.specs.map(({ name }) => Buffer.concat(rows.map((row) => row[name])));
    const { learner_incarnation, parameter_version } = said; // the same in all of an unroll
    const played = { num_envs: this.numEnvs, frames, episodes, tensors: [...tensors, ...before] };
    return { ...played, learner_incarnation, parameter_version };
  }

  begin(env) {
    this.environments[env].reset();
    return { stepType: FIRST, reward: 0, discount: 1 };
  }

  step(env, action, episodes) {
    const { reward, terminated, truncated } = this.environments[env].step(action);
    const episode = this.episodes[env];
    episode.episode_return += reward;
    episode.length += 1;
    episode.frames += 1;
    this.ended[env] = terminated || truncated;
    if (this.ended[env]) {
      episodes.push(episode);
      this.episodes[env] = newEpisode();
    }
    return { stepType: this.ended[env] ? LAST : MID, reward, discount: terminated ? 0 : 1 };
  }

  // Returns the leaves of a row that the environments give, which `step` advances one by one.
  timesteps(step) {
    const stepped = this.environments.map((_, env) => step(env));
    const floats = (name) => Buffer.from(new Uint8Array(Float32Array.from(stepped, (x) => x[name]).buffer));
    return {
      [OBSERVATION]: Buffer.concat(this.environments.map((environment) => environment.observe())),
      'timestep/reward': floats('reward'),
      'timestep/discount': floats('discount'),
      [STEP_TYPE]: Buffer.from(stepped.map(({ stepType }) => stepType)),
    };
  }
}

function newEpisode() {
  return { episode_return: 0, length: 0, frames: 0 };
}
