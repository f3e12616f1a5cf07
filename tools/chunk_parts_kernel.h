// The kernel that is measured, and the inner loop of a product of matrices. Included per instruction set.

#include "chunked_attention_kernel.h"

constexpr int kDepth = 768;

// kTile rows times kPanel columns, a sum over kDepth.
static void product(const float* x, const float* y, float* sums) {
  Tile<kTile> tile = nothing<kTile>();
  multiply(tile, x, kDepth, kDepth, y, kPanel);
  store_tile(tile, sums, kPanel, kTile, kPanel);
}
