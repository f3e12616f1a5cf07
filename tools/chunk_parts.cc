// Nanoseconds of the parts of one chunk of LinearAttention's kernel, with everything in the first cache.
//
//   chunk_parts KEYS VALUES         channels of a head
//
// Compiled and run by bench_chunk.py. A line is a part and the least of its times.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "chunked_attention.h"
#include "division.h"
#include "linear_attention.h"
#include "no_subnormals.h"
#include "operator.h"
#define KERNEL "chunk_parts_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {

void Context::parallel(size_t count, const Work<size_t>& work) const {
  for (size_t i = 0; i < count; ++i) work(i);
}

}  // namespace linexport

using namespace linexport;

namespace {

constexpr int kCalls = 1000, kRounds = 30, kChunks = 16;

double nanoseconds() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Part>
void measure(const char* name, const Part& part) {
  double least = INFINITY;
  for (int round = 0; round < kRounds; ++round) {
    const double start = nanoseconds();
    for (int i = 0; i < kCalls; ++i) {
      part();
      asm volatile("" ::: "memory");
    }
    least = std::min(least, (nanoseconds() - start) / kCalls);
  }
  std::printf("%s\t%.1f\n", name, least);
}

std::vector<float> random_values(int64_t count) {
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(std::rand()) / RAND_MAX - 0.5f;
  return values;
}

}  // namespace

int main(int, char** given) {
  using namespace KERNELS;
  const NoSubnormals none(true);
  Attention a;
  a.batch = a.query_heads = a.key_heads = a.heads = 1;
  a.queries = a.keys = kChunks * kChunk;
  a.d_k = std::atoi(given[1]), a.d_v = std::atoi(given[2]);
  a.normalize = true, a.eps = 1e-6f, a.map = Map::kElu1;
  std::vector<float> query = random_values(a.keys * a.d_k), key = random_values(a.keys * a.d_k),
                     value = random_values(a.keys * a.d_v), output(a.keys * a.d_v), state(a.d_k * a.d_v), z(a.d_k);
  a.query = query.data(), a.key = key.data(), a.value = value.data(), a.output = output.data();
  a.present_state = state.data(), a.present_normalizer = z.data();

  const Part part{0, 1, 0, panels(a)};
  std::vector<float> kept;
  float* memory = aligned(kept, memory_floats(a, part));
  const Places at(a);
  const AttentionStreams streams = {a, part, memory + at.floats, false};
  streams.open();
  const AttentionStream stream = streams[0];
  const Turn turn = streams.first();
  const Tokens tokens(a, turn);
  const Chunk chunk = {a, at, tokens, memory};
  float between[kChunk * kChunk];
  const float* to_end = between + (kChunk - 1) * kChunk;
  float *values = memory + at.by_tokens, *reciprocal = memory + at.reciprocal;
  Ahead nothing(a, tokens, int64_t{1} << 40);

  const std::vector<float> x = random_values(kTile * kDepth), y = random_values(kDepth * kPanel);
  std::vector<float> sums(kTile * kPanel);
  measure("product", [&] { product(x.data(), y.data(), sums.data()); });
  std::printf("operations of a product\t%d\n", 2 * kTile * kDepth * kPanel);
  chunk.accumulate_decays(between);
  measure("maps", [&] { chunk.map_keys(), chunk.load_queries(); });
  measure("keys transposed", [&] { chunk.transpose_keys(to_end); });
  measure("scores", [&] { chunk.pair(between); });
  measure("values copied", [&] { chunk.load_values(part, values); });
  measure("denominators", [&] { chunk.divide(stream.z, 0, reciprocal); });
  measure("state and values read", [&] {
    for (int64_t p = 0; p < part.last_panel; ++p)
      chunk.read_state(0, stream.state().panel(p).to, values + p * kChunk * kPanel, reciprocal, tokens.output + p * kPanel,
                       a.d_v - p * kPanel, nothing);
  });
  std::memset(memory + at.key, 0, a.d_k * kChunk * sizeof(float));  // so that the state stays finite
  measure("state written", [&] {
    for (int64_t p = 0; p < part.last_panel; ++p)
      chunk.write_state<false>(stream.state().panel(p).to, values + p * kChunk * kPanel, nothing);
  });
  measure("all chunks", [&] { run(a, part, memory); });
}
