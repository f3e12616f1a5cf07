// What a plugin knows of its node: see linexport/plugins/kernels/description.py, which writes it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace linexport {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A size: a number, or where `symbol` is not empty, "batch" or "length".
struct Size {
    int64_t number;
    std::string symbol;
};

struct Tensor {
    bool present;  // otherwise the tensor given means nothing
    std::string name, type;
    std::vector<Size> shape;
};

using Sizes = std::map<std::string, int64_t>;

// A factor times the product of symbols.
struct Extent {
    int64_t factor;
    std::vector<std::string> symbols;
    int64_t of(Sizes const& values) const;
};

struct Argument {
    std::string name, type;
    bool pointer() const { return type[0] == '*'; }
};

struct Launch {
    std::string kernel;
    int warps;
    std::vector<Argument> arguments;
    Extent grid[3];
};

struct Scratch {
    std::string name;
    int bytes;  // of an element
    Extent elements;
};

struct Route {
    std::vector<Launch> launches;
    std::vector<Scratch> scratch;
};

struct Plan {
    Route single, segmented, decode;
    bool hasSegmented, hasDecode;
    int64_t decodeLength, chunk, blocks, resident, multiprocessors;

    Sizes symbols(int64_t batch, int64_t length) const;
    Route const& route(int64_t batch, int64_t length) const;
    // Bytes of scratch memory that are enough for any batch and length up to these.
    int64_t mostScratch(int64_t batch, int64_t length) const;
};

struct Binary {
    std::string code, entry;
    unsigned shared;
};

struct Description {
    std::string opType;
    std::vector<Tensor> inputs, outputs;
    std::map<int, Plan> plans;                              // by compute capability
    std::map<int, std::map<std::string, Binary>> binaries;  // by compute capability and kernel

    // The compute capability whose binaries run on `sm`; throws where there is none.
    int smFor(int sm) const;
    // Batch and length from the inputs' shapes; throws where a shape is not the one described.
    Sizes sizes(std::vector<std::vector<int64_t>> const& shapes) const;
    // The same, on any GPU described.
    int64_t mostScratch(int64_t batch, int64_t length) const;
};

Description parse(std::string const& launch, std::string const& binaries);

// The same, parsed once for all nodes that have these texts.
std::shared_ptr<Description const> described(std::string const& launch, std::string const& binaries);

int64_t aligned(int64_t bytes);

}  // namespace linexport
