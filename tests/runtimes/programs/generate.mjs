// A text by Transformers.js, as node and a browser run it.
//
// asked = {name, ids, text, count}: a model, a prompt as token ids or as text, and tokens to write;
// without a count, the logits after the prompt are asked for

export async function generate(library, asked) {
  const { AutoModelForCausalLM, Tensor, pipeline } = library;
  const ones = (n) => new Tensor("int64", new BigInt64Array(n).fill(1n), [1, n]);
  const settings = { max_new_tokens: asked.count, do_sample: false };
  try {
    if (asked.text !== undefined) {
      const write = await pipeline("text-generation", asked.name, { dtype: "auto" });
      const [found] = await write(asked.text, { ...settings, return_full_text: false });
      return { text: found.generated_text };
    }
    const model = await AutoModelForCausalLM.from_pretrained(asked.name, { dtype: "auto" });
    const ids = BigInt64Array.from(asked.ids.map(BigInt));
    const inputs = new Tensor("int64", ids, [1, ids.length]);
    if (asked.count === undefined) {
      const { logits } = await model({ input_ids: inputs, attention_mask: ones(ids.length) });
      return { logits: Array.from(logits.data) };
    }
    const found = await model.generate({ inputs, ...settings });
    return { ids: Array.from(found.data, Number).slice(ids.length) };
  } catch (error) {
    return { error: `${error}` };
  }
}
