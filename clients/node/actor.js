#!/usr/bin/env node
// An actor for IMPALA as a service, written from docs/wire-protocol.md and learner.proto alone. It has
// no network: the learner acts. It plays until training is finished:
//   node actor.js --learner 127.0.0.1:5000
import { randomBytes } from 'node:crypto';
import { hostname } from 'node:os';
import { fileURLToPath } from 'node:url';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { Group } from './group.js';

const USAGE = 'usage: node actor.js --learner HOST:PORT|unix:PATH [--name NAME] [--num-envs N]';
const PROTO = fileURLToPath(new URL('../../protos/impala/v1/learner.proto', import.meta.url));
const PROTOCOL = { major: 1, minor: 0 };
const [FIRST_BACKOFF, LONGEST_BACKOFF] = [0.1, 10]; // seconds
// Settings that change what is played, which this actor knows or which do not matter to it.
const KNOWN = /^(environment\.(id|kwargs|vectorization)|agent\..*|evaluator\..*)$/;
const CHANNEL = {
  'grpc.keepalive_time_ms': 30_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.max_reconnect_backoff_ms': 10_000,
};
const { status: code } = grpc;
// Statuses that another attempt would not change.
const REFUSALS = ['FAILED_PRECONDITION', 'INVALID_ARGUMENT', 'PERMISSION_DENIED', 'UNAUTHENTICATED', 'UNIMPLEMENTED'];
// Rejections after which to join again before anything else is sent.
const REASONS_TO_JOIN = ['REASON_FINGERPRINT', 'REASON_SEQUENCE', 'REASON_NUM_ENVS', 'REASON_QUARANTINED'];

// A failure after which to join again.
class Interrupted extends Error {}

// A stream with one reply to each request, in order.
class Conversation {
  constructor(stream) {
    this.stream = stream;
    const fail = (error) => {
      this.failed ??= interrupted(error);
      this.reject?.(this.failed);
    };
    stream.on('data', (reply) => this.resolve?.(reply));
    stream.on('error', fail);
    stream.on('end', () => fail({ details: 'The learner has ended a stream.' }));
  }

  ask(request) {
    return new Promise((resolve, reject) => {
      Object.assign(this, { resolve, reject });
      if (this.failed) reject(this.failed);
      else this.stream.write(request);
    });
  }
}

class Actor {
  constructor(learner, name, numEnvs) {
    // 64-bit numbers become strings, which are exact; enums their names.
    const loaded = loadSync(PROTO, { keepCase: true, longs: String, enums: String, defaults: true });
    const { impala } = grpc.loadPackageDefinition(loaded);
    this.client = new impala.v1.Learner(learner, grpc.credentials.createInsecure(), CHANNEL);
    this.reply = null; // of the last Join
    this.finished = false;
    this.name = name;
    this.numEnvs = numEnvs;
    this.begin();
    this.message = null; // has no receipt
    this.group = null;
    this.made = seconds(); // the last message
    this.waited = 0; // seconds since, for the receipt
  }

  // Takes another incarnation.
  begin() {
    this.named = { actor: this.name, incarnation: String(randomBytes(8).readBigUInt64LE() || 1n) };
    this.sequence = 0; // of the newest message
    this.acknowledged = { acknowledged_sequence: '0', acknowledged_unrolls: '0', proof: Buffer.alloc(0) };
  }

  // Plays until the end of training.
  async run() {
    for (let backoff = FIRST_BACKOFF; ; backoff = Math.min(2 * backoff, LONGEST_BACKOFF)) {
      const began = seconds();
      try {
        return await this.session();
      } catch (error) {
        if (!(error instanceof Interrupted) || REFUSALS.includes(code[error.code])) throw error;
        console.error(`${this.named.actor}: ${code[error.code] ?? ''} ${error.message}`);
      }
      if (seconds() - began > Math.max(backoff, 0.5)) backoff = FIRST_BACKOFF; // it was a good session
      await sleep(1000 * backoff * (0.5 + 0.5 * Math.random()));
    }
  }

  // Joins, and plays for as long as the connection holds. Returns at the end of training.
  async session() {
    await this.join();
    const acting = new Conversation(this.client.Act());
    const sending = new Conversation(this.client.StreamUnrolls());
    try {
      while (!this.finished) {
        this.message ??= await this.play(acting);
        if (this.message) await this.send(sending);
      }
    } finally {
      acting.stream.cancel();
      sending.stream.cancel();
    }
  }

  async join() {
    const version = 'impala-actor-node 0.1.0';
    const request = { protocol: PROTOCOL, ...this.named, role: 'ROLE_ACTOR', version, ...this.acknowledged };
    const reply = await new Promise((resolve, reject) => {
      const done = (error, joined) => (error ? reject(interrupted(error)) : resolve(joined));
      this.client.Join(request, { deadline: Date.now() + 10_000 }, done);
    });
    const { finished, protocol: { major } } = reply;
    if (major !== PROTOCOL.major) throw new Error(`The learner speaks protocol ${major}, this actor ${PROTOCOL.major}.`);
    this.finished = finished;
    if (finished) return;
    const { needs, tasks, actor } = JSON.parse(reply.settings);
    const unknown = needs.filter((setting) => !KNOWN.test(setting));
    if (unknown.length || tasks.length !== 1 || reply.needs_permits) {
      throw new Error(`The learner has ${tasks.length} tasks, permits or ${unknown}, which this actor does not know.`);
    }
    const before = this.reply?.fingerprint;
    this.reply = reply;
    if (before !== undefined && before !== reply.fingerprint) { // another run: begin anew
      this.message = this.group = null;
      this.begin();
      throw new Interrupted('another run answers');
    }
    const size = this.message ? this.client.StreamUnrolls.requestSerialize(this.message).length : 0;
    if (size > reply.max_message_bytes) {
      throw new Error(`A message of ${size} bytes has no receipt, the learner now takes ${reply.max_message_bytes}.`);
    }
    const numEnvs = Math.min(this.numEnvs ?? Number(actor.num_envs), reply.limits.num_envs);
    if (this.group?.numEnvs !== numEnvs) this.group = new Group(reply, numEnvs);
  }

  // Plays one unroll of each environment, in which the learner acts. Returns the message, or null at the end.
  async play(acting) {
    const { group } = this;
    this.group = null; // if the stream breaks nobody can finish this unroll: begin with new episodes
    const unroll = await group.play((row) => acting.ask({ ...this.named, ...row }));
    this.finished = unroll === null;
    if (this.finished) return null;
    this.group = group;
    const elapsed_seconds = seconds() - this.made;
    const waited_seconds = Math.min(this.waited, elapsed_seconds);
    [this.made, this.sequence] = [seconds(), this.sequence + 1];
    const { sequence, reply: { fingerprint } } = this;
    return { ...this.named, sequence, fingerprint, ...unroll, elapsed_seconds, waited_seconds };
  }

  // Sends the message, and deals with its receipt.
  async send(sending) {
    const asked = seconds();
    const receipt = await sending.ask(this.message);
    this.waited = seconds() - asked;
    const { sequence, status, reason, detail, acknowledged_unrolls, proof } = receipt;
    if (reason === 'REASON_UNKNOWN_ACTOR') throw new Interrupted(detail); // the message keeps its number
    if (sequence !== String(this.message.sequence)) throw new Error(`The receipt of message ${sequence} is not due.`);
    this.acknowledged = { acknowledged_sequence: sequence, acknowledged_unrolls, proof };
    this.message = null;
    this.finished = status === 'STATUS_FINISHED';
    if (this.finished || status === 'STATUS_ACCEPTED' || status === 'STATUS_DUPLICATE') return;
    console.error(`${this.named.actor}: message ${sequence} was rejected (${reason}): ${detail}`);
    if (REASONS_TO_JOIN.includes(reason)) throw new Interrupted(detail);
  }
}

function interrupted({ code, details }) {
  return Object.assign(new Interrupted(details), { code });
}

function seconds() {
  return performance.now() / 1000;
}

const string = { type: 'string' };
try {
  const { values } = parseArgs({ options: { learner: string, name: string, 'num-envs': string } });
  if (!values.learner) throw new Error(USAGE);
  const { learner, name = `${hostname()}-node-${randomBytes(4).toString('hex')}`, 'num-envs': numEnvs } = values;
  await new Actor(learner, name, numEnvs && Number(numEnvs)).run();
  process.exit(0);
} catch (error) {
  console.error(`impala-actor: ${error.message}`);
  process.exit(1);
}
