// A request as text that repeats it: a shell command, or a program in Python.

/** A command of curl. `keyed`: the gateway asks for a key, which is read from the environment. */
export function curl({ path, body }, keyed) {
  const key = keyed ? ` -H "Authorization: Bearer $SPIRE_API_KEY"` : "";
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${address(path)} -H 'Content-Type: application/json'${key} \\\n  -d '${data}'`;
}

/** A program that uses OpenAI's client. Its literals are JSON: numbers, texts, lists and objects are the same in both. */
export function python({ body }, keyed) {
  const { speculation, ...standard } = body;
  const [method, answer] = body.messages ? ["chat.completions", "message.content"] : ["completions", "text"];
  const fields = Object.entries({ ...standard, extra_body: { speculation } });
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address("v1")}", api_key=${keyed ? 'os.environ["SPIRE_API_KEY"]' : '"none"'})`,
    `answer = client.${method}.create(`,
    ...fields.map(([name, value]) => `    ${name}=${JSON.stringify(value)},`),
    ")",
    `print(answer.choices[0].${answer})`,
    "",
  ].join("\n");
}

function address(path) {
  return new URL(path, document.baseURI).href;
}
