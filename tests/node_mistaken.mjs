// The actor of clients/node with one mistake, which the environment variable MISTAKE names: one of
// those in the table of docs/wire-protocol.md, or a breach of another rule. All else is as it is there.
import { Agent } from '../clients/node/agent.js';
import { Group } from '../clients/node/group.js';
import { Session } from '../clients/node/session.js';
import { main } from '../clients/node/actor.js';

const FIRST = 0;

// Changes what is sent of an unroll, and nothing of what the group goes on from.
function sending(change) {
  const { play } = Group.prototype;
  Group.prototype.play = function (parameters) {
    const unroll = play.call(this, parameters);
    const arrays = { ...unroll.arrays };
    for (const name of Object.keys(arrays)) arrays[name] = arrays[name].slice();
    const sent = { ...unroll, arrays, frames: [...unroll.frames], episodes: [...unroll.episodes] };
    return { ...sent, ...change(sent, this) };
  };
}

// Changes the numbers of a leaf in the rows in which an episode begins.
function inFirstRows({ arrays }, name, value) {
  arrays['timestep/step_type'].forEach((type, i) => {
    if (type === FIRST) arrays[name][i] = value;
  });
}

const MISTAKES = {
  // The action in row t is the one that led to row t - 1.
  shifted_actions: () =>
    sending(({ arrays, num_envs }, group) => {
      const actions = arrays['output/action'];
      const last = actions.length - num_envs;
      const shifted = actions.slice();
      shifted.set(actions.subarray(0, last), num_envs);
      shifted.set(group.lastShifted ?? shifted.subarray(0, num_envs));
      group.lastShifted = shifted.slice(last);
      arrays['output/action'] = shifted;
    }),
  byte_order: () =>
    sending(({ arrays }) => {
      for (const array of Object.values(arrays)) {
        if (array instanceof Float32Array) Buffer.from(array.buffer).swap32();
      }
    }),
  // Actions are drawn from logits, or means, that are not those that are sent.
  behaviour_policy: () => {
    const { act } = Agent.prototype;
    Agent.prototype.act = function (parameters, policy) {
      return act.call(this, parameters, policy.map((x) => -x));
    };
  },
  // The policy that is sent gives the action no chance.
  impossible_action: () =>
    sending(({ arrays }) => {
      const [policy, actions] = [arrays['output/policy'], arrays['output/action']];
      const size = policy.length / actions.length;
      actions.forEach((action, i) => {
        if (i % 7 === 0) policy[i * size + Number(action)] = -1e9;
      });
    }),
  // Unrolls do not overlap: row 0 is as row 1.
  row_0: () =>
    sending(({ arrays }, group) => {
      for (const array of Object.values(arrays)) {
        const size = array.length / (group.length + 1);
        array.copyWithin(0, size, 2 * size);
      }
    }),
  seam: () => sending((unroll) => inFirstRows(unroll, 'timestep/discount', 0)),
  seam_frames: () => sending(({ frames }, group) => ({ frames: frames.map(() => group.length) })),
  missing_frames: () => sending(({ frames }) => ({ frames: frames.map(() => 0) })),
  episodes: () => sending(({ episodes }) => ({ episodes: episodes.slice(1) })),
  episode_return: () =>
    sending(({ episodes }) => ({
      episodes: episodes.map((each) => ({ ...each, episode_return: each.episode_return / each.length })),
    })),
  observation: () =>
    sending(({ arrays }) => {
      arrays['timestep/observation'] = arrays['timestep/observation'].map((x) => 255 * x);
    }),
  version: () => {
    const { send } = Session.prototype;
    Session.prototype.send = function (unroll) {
      const parameters = { ...unroll.parameters, version: unroll.parameters.version + 1_000_000n };
      return send.call(this, { ...unroll, parameters });
    };
  },
};

// Changes what a method of Session does: `changed` gets the session, the original, and its arguments.
function changing(name, changed) {
  const original = Session.prototype[name];
  Session.prototype[name] = function (...given) {
    return changed(this, original.bind(this), ...given);
  };
}

const BREACHES = {
  own_weights: () =>
    changing('newestParameters', async (session, newest) => {
      if (session.parameters) return newest();
      const zeros = ({ shape }) => new Float32Array(shape.reduce((product, n) => product * n, 1));
      const tensors = session.reply.parameter_specs.map(zeros);
      return { incarnation: session.reply.learner_incarnation, version: 0n, tensors };
    }),
  old_parameters: () => changing('pull', async (session, pull) => session.parameters || pull()),
  old_incarnation: () => {
    // It compares versions alone.
    const isNew = ({ parameters, newest }) => !parameters || parameters.version < newest.version;
    changing('newestParameters', async (session, newest) => session.parameters ?? newest());
    changing('pull', async (session, pull) => isNew(session) && pull());
  },
  too_many_in_flight: () =>
    changing('join', async (session, join) => {
      const failure = await join();
      session.reply.max_unrolls_in_flight += 10;
      return failure;
    }),
  changed_retry: () =>
    changing('exchange', (session, exchange) => {
      for (const message of session.outbox) message.elapsed_seconds = 0;
      return exchange();
    }),
  new_incarnation: () =>
    changing('join', (session, join) => {
      session.incarnation = String(BigInt(session.incarnation) + 1n);
      return join();
    }),
  no_claim: () =>
    changing('join', (session, join) => {
      session.acknowledged = {};
      return join();
    }),
  left_out: () =>
    changing('join', (session, join) => {
      session.outbox = [];
      return join();
    }),
  not_again: () =>
    changing('receive', (session, receive, receipt) => {
      const isUnknown = receipt.reason === 'REASON_UNKNOWN_ACTOR';
      return receive(isUnknown ? { ...receipt, reason: 'REASON_RANGE' } : receipt);
    }),
  refused_again: () =>
    changing('receive', (session, receive, receipt) => {
      if (receipt.status !== 'STATUS_REJECTED') return receive(receipt);
      return receive({ ...receipt, reason: 'REASON_UNKNOWN_ACTOR' });
    }),
  as_large: () => // its groups stay as they are, whatever the limit
    changing('join', async (session, join) => {
      const failure = await join();
      if (session.reply) session.reply.limits.num_envs = 512;
      return failure;
    }),
  duplicate_again: () =>
    changing('receive', (session, receive, receipt) => {
      return receipt.status === 'STATUS_DUPLICATE' ? session.leave() : receive(receipt);
    }),
  no_backoff: () => {
    Math.random = () => -1; // by which only the wait before a Join is multiplied
  },
  same_run: () =>
    changing('join', async (session, join) => {
      const before = session.reply;
      const failure = await join();
      if (before) session.reply = { ...session.reply, fingerprint: before.fingerprint };
      return failure;
    }),
  endless: () => changing('finish', () => {}),
  stubborn: () =>
    changing('join', async (session, join) => {
      const failure = await join();
      return failure && Object.assign(failure, { code: 14 }); // UNAVAILABLE
    }),
  reckless: () =>
    changing('join', async (session, join) => {
      const failure = await join();
      if (session.reply) session.reply.settings.needs = [];
      return failure;
    }),
};

({ ...MISTAKES, ...BREACHES })[process.env.MISTAKE]();
process.exit(await main());
