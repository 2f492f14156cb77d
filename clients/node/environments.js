// The environments that this actor plays, one object for each of them. An environment has
//   observation, action: dtype and shape, which have to be those that the learner expects;
//   reset(): begins an episode;
//   step(action): {reward, terminated, truncated};
//   observe(row): writes the observation into a typed array.
// `random` gives numbers from 0 to 1, as Math.random does.

// Catch, as docs/wire-protocol.md describes it.
class Catch {
  constructor({ rows = 10, columns = 5, shift = 0, marked = false, reward = 1, ...unknown }, random) {
    refuseUnknown('Catch', unknown);
    Object.assign(this, { rows, columns, shift, marked, worth: reward, random });
    this.observation = { dtype: 'DTYPE_UINT8', shape: [rows + Number(marked), columns] };
    this.action = { dtype: 'DTYPE_INT64', shape: [] };
  }

  reset() {
    this.ball = { row: 0, column: Math.floor(this.random() * this.columns) };
    this.paddle = Math.floor(this.columns / 2);
  }

  step([action]) {
    this.ball.row += 1;
    const move = ((action + this.shift) % 3) - 1;
    this.paddle = Math.min(this.columns - 1, Math.max(0, this.paddle + move));
    const terminated = this.ball.row === this.rows - 1;
    const reward = this.paddle === this.ball.column ? this.worth : -this.worth;
    return { reward: terminated ? reward : 0, terminated, truncated: false };
  }

  observe(row) {
    row.fill(0);
    row[this.ball.row * this.columns + this.ball.column] = 1;
    row[(this.rows - 1) * this.columns + this.paddle] = 1;
    if (this.marked) row[this.rows * this.columns + this.shift] = 1;
  }
}

// Pendulum-v1 of Gymnasium, as the page describes it: it is swung up and held there by a torque.
class Pendulum {
  constructor({ g = 10, ...unknown }, random) {
    refuseUnknown('Pendulum-v1', unknown);
    Object.assign(this, { g, random });
    this.observation = { dtype: 'DTYPE_FLOAT32', shape: [3] };
    this.action = { dtype: 'DTYPE_FLOAT32', shape: [1] };
  }

  reset() {
    this.angle = (2 * this.random() - 1) * Math.PI; // 0 is upright
    this.speed = 2 * this.random() - 1;
    this.steps = 0;
  }

  step([action]) {
    const torque = Math.min(2, Math.max(-2, action));
    const angle = modulo(this.angle + Math.PI, 2 * Math.PI) - Math.PI;
    const reward = -(angle ** 2 + 0.1 * this.speed ** 2 + 0.001 * torque ** 2);
    // A rod of length 1 and mass 1, and a step of 0.05 seconds.
    const faster = this.speed + 0.05 * (1.5 * this.g * Math.sin(this.angle) + 3 * torque);
    this.speed = Math.min(8, Math.max(-8, faster));
    this.angle += 0.05 * this.speed;
    this.steps += 1;
    return { reward, terminated: false, truncated: this.steps === 200 };
  }

  observe(row) {
    row.set([Math.cos(this.angle), Math.sin(this.angle), this.speed]);
  }
}

const ENVIRONMENTS = { Catch, 'Pendulum-v1': Pendulum };

// Returns E environments as settings.tasks[].environment describes them.
export function makeEnvironments({ id, kwargs }, numEnvs, random) {
  const Environment = ENVIRONMENTS[id];
  if (!Environment) {
    const known = Object.keys(ENVIRONMENTS).join(', ');
    throw new Error(`The learner plays ${id}, this actor knows ${known}: add it to environments.js.`);
  }
  return Array.from({ length: numEnvs }, () => new Environment(JSON.parse(kwargs), random));
}

function refuseUnknown(id, kwargs) {
  const names = Object.keys(kwargs);
  if (names.length) throw new Error(`environment.kwargs has ${names}, which ${id} here does not know.`);
}

function modulo(x, n) {
  return ((x % n) + n) % n;
}
