#include "polynomial_attention.h"

#include <cmath>

#include "division.h"

#define KERNEL "polynomial_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("LinearAttention: ") + what);
}

void set_about(Polynomial& map, float shift, std::initializer_list<float> about) {
  map.shift = shift;
  for (float b : about) map.about[map.terms++] = b;
}

// Components that are multiplied: a matrix whose entries are below `limit`.
void read_components(const Tensor& chosen, int64_t limit, Polynomial& map) {
  expect(chosen.type == kInt64 && chosen.rank == 2 && chosen.dims[0] > 0 && chosen.dims[1] > 0,
         "the map's components have a wrong shape");
  map.components = chosen.in<int64_t>(), map.degree = chosen.dims[0], map.features = chosen.dims[1];
  for (int64_t i = 0; i < map.degree * map.features; ++i)
    expect(map.components[i] >= 0 && map.components[i] < limit, "a component of the map is out of range");
}

void expect_vector(const Tensor& x, int type, int64_t size) {
  expect(x.type == type && x.rank == 1 && x.dims[0] == size, "a parameter of the map has a wrong shape");
}

}  // namespace

bool is_polynomial(const std::string& map) {
  return map == "taylor2" || map == "quadratic" || map == "monomials" || map == "polynomial";
}

Polynomial read_polynomial(const Context& call, const std::string& name, int64_t width, size_t parameters) {
  Polynomial map;
  map.width = width;
  const Tensor first = call.input(parameters), second = call.input(parameters + 1);
  if (name == "taylor2" || name == "quadratic") {
    map.pairs = true;
    const float d = static_cast<float>(width);
    if (name == "taylor2")
      set_about(map, std::sqrt(d), {0.5f, 0.0f, 0.5f / d});  // 1 + t + t^2 / 2 with t = q . k / sqrt(d)
    else if (first)
      expect_vector(first, kFloat, 1), set_about(map, first.in<float>()[0], {0.0f, 0.0f, 1.0f});
    else
      set_about(map, 0.0f, {0.0f, 0.0f, 1.0f});
    expect(map.shift >= 0, "the map's constant is negative");
    map.features = map.first() + width * (width + 1) / 2;
    return map;
  }
  if (name == "monomials") {
    read_components(first, width, map);
    expect_vector(second, kInt64, map.features);
    map.multiplicities = second.in<int64_t>();
    expect(map.degree < Polynomial::kMostTerms, "the map's degree is above 15");
    map.terms = static_cast<int>(map.degree) + 1;
    map.about[map.degree] = 1;
    return map;
  }
  const Tensor centred = call.input(parameters + 2);
  read_components(first, width + 1, map);
  expect_vector(second, kFloat, map.features);
  map.squares = second.in<float>();
  expect(centred.rank == 1 && centred.dims[0] > 1 && centred.dims[0] <= Polynomial::kMostTerms + 1,
         "the map's degree is above 15");
  expect_vector(centred, kFloat, centred.dims[0]);
  map.shift = centred.in<float>()[0];
  map.terms = static_cast<int>(centred.dims[0]) - 1;
  for (int i = 0; i < map.terms; ++i) map.about[i] = centred.in<float>()[1 + i];
  return map;
}

void polynomial_attention(const Context& call, const Attention& attention, const Polynomial& map, int threads) {
  Attention a = attention;
  const int64_t streams = a.streams();
  const Division division(streams, DISPATCH(panels(a)), streams * 2 * a.keys * a.d_k * a.d_v, threads);
  a.past_normalizer = division.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
  division.run(call, [&](const Part& part) { DISPATCH(run(a, map, part, memory(DISPATCH(memory_floats(a, map, part))))); });
}

}  // namespace linexport
