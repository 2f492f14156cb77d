#!/usr/bin/env node
// An actor for IMPALA as a service, written from docs/wire-protocol.md and learner.proto alone. It
// plays for a learner until training is finished:
//   node actor.js --learner 127.0.0.1:5000
import { createHash } from 'node:crypto';
import { endianness, hostname } from 'node:os';
import { fileURLToPath } from 'node:url';
import { setImmediate as turn } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { Agent } from './agent.js';
import { Group } from './group.js';
import { Session } from './session.js';

const USAGE = `usage: node actor.js --learner HOST:PORT [options]

  --learner HOST:PORT     address of the learner, or unix:PATH
  --name NAME             unique in the fleet (default: made from host and process)
  --num-envs N            environments (default: what the learner advises)
  --reconnect-timeout S   seconds without a learner after which to give up (default: never)
  --proto FILE            learner.proto (default: that of this repository)`;
// Settings that change what is played, of those that may stand in settings.needs. What is computed of
// an observation, and how an action is drawn, JoinReply describes: agent.js refuses what it does not know.
const KNOWN = /^(environment\.(id|kwargs|vectorization)|agent\..*|evaluator\..*)$/;

// Plays until the end of training.
export async function play(session, { numEnvs } = {}) {
  const running = session.run();
  running.catch(() => {}); // `until` throws the same
  await session.until(() => session.reply);
  while (!session.finished) {
    // Everything is made anew when another run answers, or messages have to be smaller.
    const { reply } = session;
    const groups = makeGroups(reply, session.incarnation, numEnvs);
    const fits = () =>
      session.reply.fingerprint === reply.fingerprint && groups[0].numEnvs <= session.reply.limits.num_envs;
    while (!session.finished && fits()) {
      const parameters = await session.newestParameters();
      for (const group of groups) {
        if (session.finished || !fits()) break;
        if (group === groups.at(-1)) session.prefetch(); // late, to have them when the next round begins
        await turn(); // playing blocks: let receipts and parameters come in
        await session.send(group.play(parameters));
      }
    }
  }
  await running;
}

function makeGroups(reply, incarnation, numEnvs) {
  const unknown = reply.settings.needs.filter((setting) => !KNOWN.test(setting));
  if (unknown.length) {
    throw new Error(`The learner (${reply.version}) needs ${unknown.join(', ')}, which this actor does not know.`);
  }
  if (reply.settings.tasks.length !== 1) {
    throw new Error(`This actor plays one task, the learner has ${reply.settings.tasks.length}.`);
  }
  const { num_envs: advised, num_groups: count } = reply.settings.actor;
  const total = numEnvs ?? Number(advised);
  const inGroup = Math.min(Math.max(1, Math.floor(total / Number(count))), reply.limits.num_envs);
  return Array.from({ length: Math.max(1, Math.floor(total / inGroup)) }, (_, place) => {
    // `life` takes the incarnation's place in a run that is to be reproducible.
    const start = reply.life === '0' ? incarnation : reply.life;
    const random = generator([reply.seed, reply.actor_index, start, place].join());
    return new Group(reply, new Agent(reply, random), inGroup, random);
  });
}

// Returns a function that draws numbers from 0 to 1 (sfc32, Doty-Humphrey's PractRand), seeded by a hash.
function generator(seed) {
  const hash = createHash('sha256').update(seed).digest();
  let [a, b, c, counter] = [0, 4, 8, 12].map((at) => hash.readInt32LE(at));
  return () => {
    const drawn = (a + b + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + drawn) | 0;
    return (drawn >>> 0) / 2 ** 32;
  };
}

function options() {
  const string = { type: 'string' };
  const { values } = parseArgs({
    options: {
      ...{ learner: string, name: string, 'num-envs': string, 'reconnect-timeout': string, proto: string },
      help: { type: 'boolean' },
    },
  });
  if (values.help) {
    console.log(USAGE);
    process.exit(0);
  }
  if (!values.learner) throw new Error('--learner is missing');
  const positive = (name) => {
    if (values[name] === undefined) return undefined;
    if (!(Number(values[name]) > 0)) throw new Error(`--${name} is ${values[name]}: give a number above 0`);
    return Number(values[name]);
  };
  return {
    learner: values.learner,
    name: values.name ?? `${hostname()}-node-${process.pid}`,
    numEnvs: positive('num-envs'),
    reconnectSeconds: positive('reconnect-timeout'),
    proto: values.proto ?? fileURLToPath(new URL('../../protos/impala/v1/learner.proto', import.meta.url)),
  };
}

export async function main() {
  let told;
  try {
    told = options();
  } catch (error) {
    console.error(`${error.message}\n\n${USAGE}`);
    return 2;
  }
  try {
    if (endianness() !== 'LE') throw new Error('This CPU is big endian: swap the bytes in session.js.');
    await play(new Session(told), told);
    return 0;
  } catch (error) {
    console.error(`impala-actor: ${error.message}`);
    return 1;
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exit(await main());
