// Run jobs under node: node run.mjs RUNTIME JOBS.json, where node_modules are beside the jobs.
//
// job = {model, calls, result}: paths of a model, of what to call it with, of what it returns

import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";

import { runCalls } from "./calls.mjs";

const [packages, runtime, jobs] = process.argv.slice(2);
const ort = createRequire(`${packages}/`)(runtime);
if (runtime === "onnxruntime-web") ort.env.wasm.numThreads = 1;
for (const job of JSON.parse(await readFile(jobs, "utf8"))) {
  const model = new Uint8Array(await readFile(job.model));
  const calls = JSON.parse(await readFile(job.calls, "utf8"));
  await writeFile(job.result, JSON.stringify(await runCalls(ort, model, calls)));
}
process.exit(0); // the workers of WebAssembly would go on
