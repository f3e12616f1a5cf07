// The calls of a model, in onnxruntime-web or onnxruntime-node; states go from one to the next.
//
// Imports nothing: node runs it as well as a browser.

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

function decoded(ort, value) {
  const bytes = Uint8Array.from(atob(value.data), (c) => c.charCodeAt(0));
  const array = new ARRAYS[value.dtype](bytes.buffer);
  return new ort.Tensor(value.dtype, array, value.shape);
}

function encoded(tensor) {
  const { buffer, byteOffset, byteLength } = tensor.data;
  let text = "";
  for (const byte of new Uint8Array(buffer, byteOffset, byteLength)) text += String.fromCharCode(byte);
  return { dtype: tensor.type, shape: [...tensor.dims], data: btoa(text) };
}

async function outputs(ort, model, calls) {
  const session = await ort.InferenceSession.create(model, { logSeverityLevel: 4 });
  const found = [];
  let states = {};
  for (const call of calls) {
    const feeds = {};
    for (const [name, value] of Object.entries(call.feeds)) feeds[name] = decoded(ort, value);
    for (const [past, present] of Object.entries(call.carried)) feeds[past] = states[present];
    const given = await session.run(feeds, [...call.outputs, ...call.kept]);
    states = Object.fromEntries(call.kept.map((name) => [name, given[name]]));
    found.push(Object.fromEntries(call.outputs.map((name) => [name, encoded(given[name])])));
  }
  await session.release();
  return found;
}

export async function runCalls(ort, model, calls) {
  try {
    return { outputs: await outputs(ort, model, calls) };
  } catch (error) {
    return { error: `${error}` };
  }
}
