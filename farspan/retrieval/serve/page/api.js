// The API of the server that the page is from. A busy server is asked again when it says.

const TRIES = 6;

export class Refused extends Error {
  constructor(problem, status) {
    super(problem.what);
    this.problem = problem;
    this.status = status;
  }
}

const wait = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

/** What the server answers. `waiting` is told the seconds until it is asked again. Throws Refused. */
export async function ask(address, { body, signal, waiting } = {}) {
  const options = body === undefined ? { signal } : {
    signal, method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  for (let tried = 1; ; tried++) {
    const answer = await fetched(address, options);
    if (answer.ok) return await answer.json();
    const again = Number(answer.headers.get("retry-after"));
    if (answer.status === 503 && again > 0 && tried < TRIES) {
      waiting?.(again);
      await wait(again, signal);
      continue;
    }
    throw new Refused(await problemOf(answer), answer.status);
  }
}

async function fetched(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const problem = {
      code: "no-answer", what: "the server does not answer", where: location.host,
      fact: "it has ended, or the way to it is broken", remedy: "start it again: farspan serve",
    };
    throw new Refused(problem, 0);
  }
}

async function problemOf(answer) {
  try {
    return (await answer.json()).problem;
  } catch {
    return {
      code: String(answer.status), what: "the server gives no answer", where: location.host,
      fact: `status ${answer.status}`, remedy: "ask again",
    };
  }
}
