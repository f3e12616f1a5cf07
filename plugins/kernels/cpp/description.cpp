#include "description.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

namespace linexport {
namespace {

// Bounds of what is read: any more is damaged. Products and sums of these do not leave their types.
int constexpr deepest = 32;        // lists and objects within each other; those of linexport's are 8 deep
size_t constexpr mostAxes = 8;     // TensorRT's
size_t constexpr mostTensors = 64, mostSymbols = 4;
int64_t constexpr mostElements = int64_t{1} << 40, mostBlocks = int64_t{1} << 20, mostThreads = 1024 / 32;

[[noreturn]] void damaged() { throw Error("the description of a node is damaged"); }

// JSON as Python's json module writes it.
struct Json {
    enum Kind { null, boolean, number, text, list, object } kind = null;
    double value = 0;
    std::string string;
    std::vector<Json> items;
    std::map<std::string, Json> members;

    Json const& at(std::string const& name) const {
        auto found = members.find(name);
        if (found == members.end()) throw Error("the description of a node lacks " + name);
        return found->second;
    }
    int64_t integer(int64_t least = 0, int64_t most = mostElements) const {
        // As doubles: what is no number of an integer's range has no integer.
        bool const fits = kind == number && value >= static_cast<double>(least) && value <= static_cast<double>(most);
        if (!fits || value != std::floor(value)) damaged();
        return static_cast<int64_t>(value);
    }
};

class Reader {
public:
    explicit Reader(std::string const& text) : mText(text) {}

    Json read() {
        Json found = value();
        space();
        if (mAt != mText.size()) fail();
        return found;
    }

private:
    [[noreturn]] static void fail() { damaged(); }

    void space() {
        while (mAt < mText.size() && std::string(" \n\r\t").find(mText[mAt]) != std::string::npos) ++mAt;
    }
    char peek() {
        space();
        if (mAt >= mText.size()) fail();
        return mText[mAt];
    }
    bool taken(char wanted) {
        bool const found = peek() == wanted;
        mAt += found;
        return found;
    }
    void expect(char wanted) {
        if (!taken(wanted)) fail();
    }
    bool word(char const* wanted) {
        std::string const name = wanted;
        bool const found = mText.compare(mAt, name.size(), name) == 0;
        if (found) mAt += name.size();
        return found;
    }

    Json value() {
        Json found;
        switch (peek()) {
        case '{':
            found.kind = Json::object;
            deeper([&] { members(found); });
            return found;
        case '[':
            found.kind = Json::list;
            deeper([&] { items(found); });
            return found;
        case '"':
            found.kind = Json::text;
            found.string = string();
            return found;
        }
        if (word("null")) return found;
        found.kind = Json::boolean;
        found.value = 1;
        if (word("true")) return found;
        found.value = 0;
        if (word("false")) return found;
        found.kind = Json::number;
        char* end = nullptr;
        found.value = std::strtod(mText.c_str() + mAt, &end);
        size_t const place = static_cast<size_t>(end - mText.c_str());
        if (place == mAt) fail();
        mAt = place;
        return found;
    }
    // What is within another: each takes room on the stack, here and when it is forgotten.
    template <typename Function>
    void deeper(Function const& function) {
        if (++mDepth > deepest) fail();
        function();
        --mDepth;
    }
    void members(Json& found) {
        expect('{');
        if (taken('}')) return;
        do {
            space();
            std::string const name = string();
            expect(':');
            found.members.emplace(name, value());
        } while (taken(','));
        expect('}');
    }
    void items(Json& found) {
        expect('[');
        if (taken(']')) return;
        do found.items.push_back(value());
        while (taken(','));
        expect(']');
    }
    std::string string() {
        expect('"');
        std::string found;
        for (; mAt < mText.size() && mText[mAt] != '"'; ++mAt) {
            // Names, types and base64: nothing in them needs an escape.
            if (mText[mAt] == '\\') fail();
            found += mText[mAt];
        }
        expect('"');
        return found;
    }

    std::string const& mText;
    size_t mAt = 0;
    int mDepth = 0;
};

std::array<int8_t, 256> places() {
    std::array<int8_t, 256> found;
    found.fill(-1);
    int8_t place = 0;
    for (unsigned char letter :
        std::string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"))
        found[letter] = place++;
    return found;
}

std::string decoded(std::string const& base64) {
    static std::array<int8_t, 256> const place = places();
    std::string found;
    found.reserve(base64.size() / 4 * 3);
    uint32_t bits = 0;
    int count = 0;
    for (unsigned char letter : base64) {
        if (letter == '=') break;
        if (place[letter] < 0) throw Error("a kernel of a node is damaged");
        bits = bits << 6 | static_cast<uint32_t>(place[letter]);
        count += 6;
        if (count >= 8) {
            count -= 8;
            found += static_cast<char>(bits >> count & 0xff);
        }
    }
    return found;
}

Tensor tensor(Json const& json) {
    Tensor found{json.kind == Json::object, "", "", {}};
    if (!found.present) return found;
    found.name = json.at("name").string;
    found.type = json.at("type").string;
    for (Json const& size : json.at("shape").items) {
        bool const named = size.kind == Json::text;
        if (named && size.string != "batch" && size.string != "length") damaged();
        found.shape.push_back({named ? 0 : size.integer(), size.string});
    }
    if (found.shape.size() > mostAxes) damaged();
    return found;
}

Extent extent(Json const& json) {
    static std::set<std::string> const known{"batch", "length", "chunks", "segments", "chunks_per_segment"};
    Extent found{json.at("factor").integer(), {}};
    for (Json const& symbol : json.at("symbols").items) {
        if (!known.count(symbol.string)) damaged();
        found.symbols.push_back(symbol.string);
    }
    if (found.symbols.size() > mostSymbols) damaged();
    return found;
}

int elementBytes(std::string const& type) {
    static std::map<std::string, int> const known{{"fp32", 4}, {"i32", 4}, {"fp16", 2}, {"bf16", 2}, {"i8", 1}};
    auto found = known.find(type);
    if (found == known.end()) throw Error("a node has the unknown type " + type);
    return found->second;
}

Route route(Json const& json) {
    Route found;
    if (json.kind == Json::null) return found;
    for (Json const& item : json.at("launches").items) {
        Json const& kernel = item.at("kernel");
        int const warps = static_cast<int>(kernel.at("warps").integer(1, mostThreads));
        Launch launch{kernel.at("name").string, warps, {}, {}};
        for (Json const& argument : kernel.at("arguments").items)
            launch.arguments.push_back({argument.at("name").string, argument.at("type").string});
        std::vector<Json> const& grid = item.at("grid").items;
        if (grid.size() != 3) damaged();
        for (size_t i = 0; i < 3; ++i) launch.grid[i] = extent(grid[i]);
        found.launches.push_back(std::move(launch));
    }
    for (Json const& item : json.at("scratch").items)
        found.scratch.push_back(
            {item.at("name").string, elementBytes(item.at("type").string), extent(item.at("elements"))});
    return found;
}

Plan plan(Json const& json) {
    return {route(json.at("single")),
        route(json.at("segmented")),
        route(json.at("decode")),
        json.at("segmented").kind != Json::null,
        json.at("decode").kind != Json::null,
        json.at("decode_length").integer(),
        json.at("chunk").integer(1),
        json.at("blocks").integer(1, mostBlocks),
        json.at("resident").integer(0, mostBlocks),
        json.at("multiprocessors").integer(0, mostBlocks)};
}

// A compute capability times ten, as a key of an object.
int capability(std::string const& text) {
    bool const digits = !text.empty() && text.size() < 5 && text.find_first_not_of("0123456789") == std::string::npos;
    if (!digits) damaged();
    return std::stoi(text);
}

std::vector<Tensor> tensors(Json const& json) {
    if (json.items.empty() || json.items.size() > mostTensors) damaged();
    std::vector<Tensor> found;
    for (Json const& item : json.items) found.push_back(tensor(item));
    return found;
}

int64_t ceilDiv(int64_t numerator, int64_t denominator) {
    return (numerator + denominator - 1) / denominator;
}

std::string listed(std::vector<int64_t> const& shape) {
    std::string text = "(";
    for (int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
    return text + ")";
}

int64_t constexpr leastChunks = 8;

// As runs_on of architectures.py: later minor versions of the major version, but neither between Jetson and
// desktop GPUs, nor binaries with instructions of one architecture.
bool runsOn(int binary, int gpu) {
    static std::set<int> const tegra{87, 110}, ownInstructions{90, 100, 103, 110, 121};
    if (binary == gpu) return true;
    bool const later = binary < gpu && binary / 10 == gpu / 10;
    return later && !ownInstructions.count(binary) && !tegra.count(binary) && !tegra.count(gpu);
}

}  // namespace

int64_t aligned(int64_t bytes) { return ceilDiv(bytes, 256) * 256; }

int64_t Extent::of(Sizes const& values) const {
    int64_t product = factor;
    for (std::string const& symbol : symbols)
        if (__builtin_mul_overflow(product, values.at(symbol), &product) || product > mostElements)
            throw Error("a call of a node is too large");
    return product;
}

Sizes Plan::symbols(int64_t batch, int64_t length) const {
    int64_t const chunks = std::max<int64_t>(ceilDiv(length, chunk), 1);
    int64_t segments = 1;
    if (hasSegmented) {
        int64_t const wanted = resident * multiprocessors / std::max<int64_t>(batch * blocks, 1);
        segments = std::max<int64_t>(std::min(wanted, chunks / leastChunks), 1);
    }
    int64_t const each = ceilDiv(chunks, segments);
    return {{"batch", batch},
        {"length", length},
        {"chunks", chunks},
        {"segments", ceilDiv(chunks, each)},
        {"chunks_per_segment", each}};
}

Route const& Plan::route(int64_t batch, int64_t length) const {
    if (hasDecode && length <= decodeLength) return decode;
    return hasSegmented && symbols(batch, length).at("segments") > 1 ? segmented : single;
}

int64_t Plan::mostScratch(int64_t batch, int64_t length) const {
    int64_t most = 0;
    for (int64_t rows = 1; rows <= batch; ++rows) {
        Sizes values = symbols(rows, length);
        // The number of segments does not always grow with the length; its limit does.
        int64_t const wanted = resident * multiprocessors / (rows * blocks);
        values["segments"] = std::max<int64_t>(std::min(wanted, values["chunks"] / leastChunks), 1);
        for (Route const* taken : {&single, &segmented, &decode}) {
            int64_t total = 0;
            for (Scratch const& buffer : taken->scratch)
                total += aligned(buffer.bytes * buffer.elements.of(values));
            most = std::max(most, total);
        }
    }
    return most;
}

int Description::smFor(int sm) const {
    int best = 0;
    for (auto const& [known, plan] : plans)
        if (runsOn(known, sm)) best = std::max(best, known);
    if (!best) throw Error(opType + " has no kernels for compute capability " + std::to_string(sm));
    return best;
}

Sizes Description::sizes(std::vector<std::vector<int64_t>> const& shapes) const {
    Sizes found{{"batch", -1}, {"length", -1}};
    for (size_t i = 0; i < inputs.size(); ++i) {
        Tensor const& tensor = inputs[i];
        if (!tensor.present) continue;
        bool fits = shapes.at(i).size() == tensor.shape.size();
        for (size_t axis = 0; fits && axis < tensor.shape.size(); ++axis) {
            Size const& size = tensor.shape[axis];
            int64_t const given = shapes[i][axis];
            fits = given >= 0 && given <= mostElements;
            if (!fits) break;
            if (!size.symbol.empty() && found.at(size.symbol) < 0) found[size.symbol] = given;
            fits = given == (size.symbol.empty() ? size.number : found.at(size.symbol));
        }
        if (!fits) throw Error(opType + ": " + tensor.name + " has shape " + listed(shapes[i]));
    }
    for (auto& [name, size] : found)
        if (size < 0) size = 1;
    return found;
}

int64_t Description::mostScratch(int64_t batch, int64_t length) const {
    int64_t most = 0;
    for (auto const& [sm, plan] : plans) most = std::max(most, plan.mostScratch(batch, length));
    return most;
}

Description parse(std::string const& launch, std::string const& binaries) {
    Json const head = Reader(launch).read();
    if (head.at("format").integer() != 2) throw Error("a node was made by another version of linexport");
    Description found;
    found.opType = head.at("op_type").string;
    found.inputs = tensors(head.at("inputs"));
    found.outputs = tensors(head.at("outputs"));
    if (!found.inputs[0].present) damaged();  // it stands for those that mean nothing
    for (Tensor const& output : found.outputs)
        if (!output.present) damaged();
    for (auto const& [sm, item] : head.at("plans").members) found.plans.emplace(capability(sm), plan(item));
    Json const made = Reader(binaries).read();
    for (auto const& [sm, kernels] : made.members)
        for (auto const& [name, item] : kernels.members)
            found.binaries[capability(sm)].emplace(name,
                Binary{decoded(item.at("code").string), item.at("entry").string,
                    static_cast<unsigned>(item.at("shared").integer(0, mostBlocks))});
    return found;
}

std::shared_ptr<Description const> described(std::string const& launch, std::string const& binaries) {
    static std::mutex mutex;
    static std::map<std::pair<std::string, std::string>, std::weak_ptr<Description const>> known;
    std::lock_guard<std::mutex> const locked(mutex);
    for (auto at = known.begin(); at != known.end();) at = at->second.expired() ? known.erase(at) : std::next(at);
    std::weak_ptr<Description const>& kept = known[{launch, binaries}];
    std::shared_ptr<Description const> found = kept.lock();
    if (!found) kept = found = std::make_shared<Description const>(parse(launch, binaries));
    return found;
}

}  // namespace linexport
