// The description of a node's kernels as nodes carry it: two texts with a zero byte between them.
#include "description.h"

#include <string>
#include <vector>

std::vector<std::string> const& dictionary() {
    static std::vector<std::string> const words{"[", "{", "\"", "null", "true", "\"batch\"", "\"length\"", "\"chunks\"",
        "\"shape\":[", "\"symbols\":[\"batch\",\"batch\",\"batch\"]", "\"factor\":1099511627776", "nan", "-0x1p900", "\\", ",", "]", "}"};
    return words;
}

void fuzz(std::string const& input) {
    using namespace linexport;
    size_t const middle = input.find('\0');
    try {
        Description const found = parse(
            input.substr(0, middle), middle == std::string::npos ? "{}" : input.substr(middle + 1));
        for (int64_t size : {int64_t{1}, int64_t{3}, int64_t{1} << 41}) {
            std::vector<std::vector<int64_t>> shapes;
            for (Tensor const& tensor : found.inputs) {
                shapes.emplace_back();
                for (Size const& one : tensor.shape)
                    shapes.back().push_back(one.symbol.empty() ? one.number : size);
            }
            try {
                Sizes const sizes = found.sizes(shapes);
                found.mostScratch(std::min<int64_t>(sizes.at("batch"), 4), sizes.at("length"));
                for (auto const& [sm, plan] : found.plans) {
                    Sizes const symbols = plan.symbols(sizes.at("batch"), sizes.at("length"));
                    for (Launch const& launch : plan.route(sizes.at("batch"), sizes.at("length")).launches)
                        for (Extent const& extent : launch.grid) extent.of(symbols);
                }
            } catch (std::exception const&) {
            }
        }
        found.smFor(90);
    } catch (std::exception const&) {
    }
}
