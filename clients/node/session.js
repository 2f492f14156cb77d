// The session with a learner: joins, a stream of messages with receipts, parameters. Everything that
// docs/wire-protocol.md says about numbers, receipts, resending, incarnations and back-off is here.
import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const PROTOCOL = { major: 2, minor: 3 };
const JOIN_SECONDS = 10, PULL_SECONDS = 60; // deadlines
const ASK_SECONDS = 1; // between two requests for parameters while the learner has no newer ones
const FIRST_BACKOFF = 0.1, LONGEST_BACKOFF = 10; // seconds
const TYPED = { DTYPE_FLOAT32: Float32Array, DTYPE_INT32: Int32Array, DTYPE_INT64: BigInt64Array };
const CHANNEL = {
  'grpc.enable_http_proxy': 0,
  'grpc.max_receive_message_length': -1,
  'grpc.keepalive_time_ms': 30_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.keepalive_permit_without_calls': 1,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 10_000,
};
const { status: code } = grpc;
const REFUSALS = [ // statuses that another attempt would not change
  ...[code.FAILED_PRECONDITION, code.INVALID_ARGUMENT, code.PERMISSION_DENIED],
  ...[code.UNAUTHENTICATED, code.UNIMPLEMENTED],
];
// Rejections after which to join again before anything else is sent.
const REASONS_TO_JOIN = [
  ...['REASON_UNKNOWN_ACTOR', 'REASON_FINGERPRINT', 'REASON_SEQUENCE'],
  ...['REASON_NUM_ENVS', 'REASON_QUARANTINED'],
];

export class Session {
  // proto: path of learner.proto. reconnectSeconds: without a learner, after which to give up.
  constructor({ learner, name, proto, reconnectSeconds = Infinity, log = console.error }) {
    // 64-bit numbers become strings, which are exact; enums their names.
    const { impala } = grpc.loadPackageDefinition(
      loadSync(proto, { keepCase: true, longs: String, enums: String, defaults: true }),
    );
    this.learner = learner;
    this.name = name;
    this.log = log;
    this.reconnectSeconds = reconnectSeconds;
    this.incarnation = newIncarnation();
    this.client = new impala.v1.Learner(learner, grpc.credentials.createInsecure(), CHANNEL);
    this.reply = null; // of the last Join
    this.parameters = null; // the newest: {incarnation, version, tensors}
    this.finished = false;
    this.error = null; // why the session cannot go on
    this.sequence = 0; // of the newest message
    this.acknowledged = { acknowledged_sequence: '0', acknowledged_unrolls: '0', proof: Buffer.alloc(0) };
    this.outbox = []; // messages without a receipt, in order; the first `sent` of them are in the stream
    this.sent = 0;
    this.stream = null;
    this.newest = { incarnation: '0', version: 0n }; // what the learner has said of its parameters
    this.pulling = null; // a Promise while parameters are asked for
    this.pulled = 0; // when they were asked for last
    this.made = seconds(); // the last message
    this.waited = 0; // seconds since, in which the actor stood still
    this.waiting = []; // functions to be called when something has changed
  }

  // Keeps a connection to the learner until the end of training; returns then. Throws if the
  // learner refuses this actor for good, or stays away for longer than `reconnectSeconds`.
  async run() {
    let backoff = FIRST_BACKOFF;
    let lastSeen = seconds();
    let told = null; // the last failure, to be logged once
    try {
      while (!this.finished) {
        const began = seconds();
        const failure = (await this.join()) ?? (await this.exchange());
        if (this.finished || this.error) break;
        if (failure && REFUSALS.includes(failure.code)) {
          throw new Error(`${this.learner} refused ${this.name}: ${failure.details}`);
        }
        // A learner that asks to wait is there. A session was good if it outlasted the last wait.
        if (!failure || failure.wasJoined || failure.code === code.RESOURCE_EXHAUSTED) lastSeen = seconds();
        if (!failure || (failure.wasJoined && seconds() - began > backoff)) backoff = FIRST_BACKOFF;
        const why = failure && `${code[failure.code]}: ${failure.details}`;
        if (why && why !== told) this.log(`${this.name} waits for ${this.learner}: ${why}`);
        told = why;
        if (seconds() - lastSeen > this.reconnectSeconds) {
          throw new Error(`No learner at ${this.learner} for ${this.reconnectSeconds} s.`);
        }
        await sleep(1000 * backoff * (0.5 + 0.5 * Math.random()));
        backoff = Math.min(2 * backoff, LONGEST_BACKOFF);
      }
    } catch (error) {
      this.error = error;
    } finally {
      this.client.close();
      this.changed();
    }
    if (this.error) throw this.error;
  }

  // Joins. Returns the failure, or null.
  async join() {
    const request = {
      protocol: PROTOCOL, actor: this.name, incarnation: this.incarnation, role: 'ROLE_ACTOR',
      version: 'impala-actor-node 0.1.0', ...this.acknowledged,
    };
    const { error, reply } = await this.call('Join', request, JOIN_SECONDS);
    if (error) return error;
    const [theirs, ours] = [reply.protocol, PROTOCOL].map(({ major, minor }) => `${major}.${minor}`);
    if (reply.protocol.major !== PROTOCOL.major) {
      throw new Error(`The learner speaks protocol ${theirs}, this actor ${ours}.`);
    }
    if (reply.finished) this.finish();
    if (this.reply && reply.fingerprint !== this.reply.fingerprint) this.forget(); // another run
    if (reply.learner_incarnation !== this.newest.incarnation) {
      this.newest = { incarnation: reply.learner_incarnation, version: 0n };
    }
    this.reply = reply;
    this.changed();
    return null;
  }

  // Sends what has no receipt, and what comes, until the stream ends. Returns the failure, or null.
  exchange() {
    return new Promise((resolve) => {
      const stream = this.client.StreamUnrolls();
      const end = (failure) => {
        this.stream = null;
        resolve(failure);
      };
      stream.on('data', (receipt) => {
        if (this.stream === stream) this.receive(receipt); // otherwise it has been left
      });
      stream.on('error', (error) => end(Object.assign(error, { wasJoined: true })));
      stream.on('end', () => end(null));
      this.stream = stream;
      this.sent = 0;
      this.flush();
      if (this.finished) this.leave();
    });
  }

  flush() {
    while (this.stream && this.sent < this.outbox.length) this.stream.write(this.outbox[this.sent++]);
  }

  // Ends the stream from this side; `run` joins again unless training has ended.
  leave() {
    const { stream } = this;
    this.stream = null;
    stream?.end();
    stream?.cancel();
  }

  receive(receipt) {
    this.heard(receipt.learner_incarnation, BigInt(receipt.newest_version));
    if (receipt.reason === 'REASON_UNKNOWN_ACTOR') {
      this.leave(); // the message keeps its place and its number
      return;
    }
    const [oldest] = this.outbox;
    if (!this.sent || String(oldest.sequence) !== receipt.sequence) {
      const expected = oldest ? `that of message ${oldest.sequence}` : 'none';
      this.fail(new Error(`The receipt of message ${receipt.sequence} came; expected was ${expected}.`));
      return;
    }
    this.outbox.shift();
    this.sent -= 1;
    this.acknowledged = {
      acknowledged_sequence: receipt.sequence,
      acknowledged_unrolls: receipt.acknowledged_unrolls,
      proof: receipt.proof,
    };
    if (receipt.status === 'STATUS_FINISHED') {
      this.finish();
    } else if (receipt.status !== 'STATUS_ACCEPTED' && receipt.status !== 'STATUS_DUPLICATE') {
      const { sequence, reason, detail } = receipt;
      this.log(`${this.name}: message ${sequence} was rejected (${reason}): ${detail}`);
      if (receipt.reason === 'REASON_VERSION') this.pulled = 0;
      if (REASONS_TO_JOIN.includes(receipt.reason)) this.leave();
    }
    this.changed();
  }

  // Takes note of the learner's newest parameters. Another incarnation is another learner: join it first.
  heard(incarnation, version) {
    if (incarnation !== this.newest.incarnation || version > this.newest.version) {
      this.newest = { incarnation, version };
    }
    if (incarnation !== this.reply.learner_incarnation) this.leave();
  }

  // Sends unrolls, after waiting for room if `max_unrolls_in_flight` messages have no receipt.
  async send({ parameters, num_envs, frames, episodes, arrays }) {
    const { fingerprint, unroll_specs } = this.reply;
    const started = seconds();
    await this.until(() => this.outbox.length < this.reply.max_unrolls_in_flight);
    this.waited += seconds() - started;
    if (this.finished || fingerprint !== this.reply.fingerprint) return; // what was made is worth nothing now
    const message = {
      actor: this.name, incarnation: this.incarnation, sequence: ++this.sequence, fingerprint,
      learner_incarnation: parameters.incarnation, parameter_version: String(parameters.version),
      num_envs, frames, episodes,
      tensors: unroll_specs.map(({ name }) => bytes(arrays[name])),
      elapsed_seconds: seconds() - this.made, waited_seconds: Math.min(this.waited, seconds() - this.made),
    };
    const size = this.client.StreamUnrolls.requestSerialize(message).length;
    if (size > this.reply.max_message_bytes) {
      const most = this.reply.max_message_bytes;
      throw new Error(`A message has ${size} bytes, the learner takes ${most}: lower --num-envs.`);
    }
    [this.made, this.waited] = [seconds(), 0];
    this.outbox.push(message);
    this.flush();
  }

  // Asks for newer parameters in the background, if the learner may have some.
  prefetch() {
    const { parameters: held, newest } = this;
    const isOld = !held || held.incarnation !== newest.incarnation || held.version < newest.version;
    if (this.pulling || !this.stream || (!isOld && seconds() - this.pulled < ASK_SECONDS)) return;
    this.pulled = seconds();
    this.pulling = this.pull()
      .catch((error) => this.fail(error))
      .finally(() => {
        this.pulling = null;
        this.changed();
      });
  }

  async pull() {
    const { reply: joined, parameters: held } = this;
    const request = { learner_incarnation: held?.incarnation ?? '0', newer_than: String(held?.version ?? 0) };
    const { error, reply } = await this.call('GetParameters', request, PULL_SECONDS);
    if (error) return; // the old ones are kept
    if (reply.parameters) {
      const { learner_incarnation: incarnation, version, tensors } = reply.parameters;
      this.heard(incarnation, BigInt(version));
      if (incarnation !== this.reply.learner_incarnation) return; // another learner, to be joined first
      if (joined.fingerprint !== this.reply.fingerprint) return;
      this.parameters = { incarnation, version: BigInt(version), tensors: this.decode(tensors) };
    }
    if (reply.finished) this.finish();
  }

  // Returns the newest parameters of the learner that answers now; waits until there are some.
  async newestParameters() {
    while (!this.finished) {
      const { parameters: held, newest } = this;
      if (held && this.reply && held.incarnation === newest.incarnation) return held;
      const started = seconds();
      this.prefetch();
      await this.until(() => this.parameters !== held, 200);
      this.waited += seconds() - started;
    }
    return null;
  }

  decode(tensors) {
    const specs = this.reply.parameter_specs;
    return specs.map(({ name, dtype, shape }, i) => {
      const size = shape.reduce((product, n) => product * n, 1);
      const Typed = TYPED[dtype];
      if (!Typed) throw new Error(`Parameter ${name} is ${dtype}, which is not known here: add it to TYPED.`);
      if (tensors[i]?.length !== size * Typed.BYTES_PER_ELEMENT) {
        throw new Error(`Parameter ${name} has ${tensors[i]?.length} bytes; expected was ${dtype} [${shape}].`);
      }
      return new Typed(Uint8Array.from(tensors[i]).buffer); // a copy, which is aligned
    });
  }

  // Waits until `condition` holds, training has ended, or milliseconds have passed, if they are given.
  // Throws if the session cannot go on.
  async until(condition, milliseconds) {
    let isLate = false;
    const late = () => {
      isLate = true;
      this.changed();
    };
    const timer = milliseconds && setTimeout(late, milliseconds);
    while (!this.finished && !this.error && !isLate && !condition()) {
      await new Promise((resolve) => this.waiting.push(resolve));
    }
    clearTimeout(timer);
    if (this.error) throw this.error;
  }

  changed() {
    this.waiting.splice(0).forEach((resolve) => resolve());
  }

  // Forgets what has no receipt: the numbers go on after the last one that has.
  forget() {
    this.outbox = [];
    this.sent = 0;
    this.sequence = Number(this.acknowledged.acknowledged_sequence);
    this.parameters = null;
  }

  finish() {
    this.finished = true;
    this.forget();
    this.leave();
    this.changed();
  }

  fail(error) {
    this.error ??= error;
    this.leave();
    this.changed();
  }

  // Makes a unary call. Returns {error} or {reply}.
  call(method, request, deadline) {
    const options = { deadline: Date.now() + 1000 * deadline };
    return new Promise((resolve) => {
      this.client[method](request, options, (error, reply) => resolve({ error, reply }));
    });
  }
}

// A random 64-bit number, not 0.
function newIncarnation() {
  return String(randomBytes(8).readBigUInt64LE() || 1n);
}

function bytes(array) {
  return Buffer.from(array.buffer, array.byteOffset, array.byteLength);
}

function seconds() {
  return performance.now() / 1000;
}
