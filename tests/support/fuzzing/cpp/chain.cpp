// Chain and Tokenwise of the CPU library: attributes of nodes in a file, and calls with small inputs.
//
// An input is lines: "o NAME" the operator, "s NAME TEXT", "i NAME INTEGER", "f NAME FLOAT" attributes, "x TYPE DIMS..."
// inputs, and "y COUNT" outputs.
#include <cstdlib>
#include <sstream>

#include "ort_stand_in.h"

std::vector<std::string> const& dictionary() {
    static std::vector<std::string> const words{"o Chain\n", "o Tokenwise\n", "s steps ", "s program ", "LinearAttention ", "CausalConvTokens ",
        "CausalConvWithState ", "StabilizedExp ", "Tokenwise ", "Chain ", "x 1 1 2 4\n", "x 1 4 1 2\n", "x 7 1 2\n", "y 2\n",
        "i step0_q_num_heads 1\n", "i step0_kv_num_heads 2\n", "s step1_activation silu\n", " -1 ", " 63 ", " 0 1 2 3 ", "Mul ", "Where ", "Mean "};
    return words;
}

namespace {

constexpr size_t kMostValues = 1 << 12, kMostInputs = linexport::kMostTensors;

struct Node {
    std::string op;
    OrtKernelInfo info;
    OrtKernelContext call;

    explicit Node(const std::string& input) {
        std::istringstream lines(input);
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            std::string what, name;
            words >> what;
            if (what == "o") words >> op;
            if (what == "i") words >> name >> info.integers[name];
            if (what == "f") words >> name >> info.floats[name];
            if (what == "s") words >> name >> std::ws, std::getline(words, info.texts[name]);
            if (what == "x" && call.inputs.size() < kMostInputs) call.inputs.push_back(value(words));
            size_t count = 0;
            if (what == "y" && words >> count && count <= linexport::kMostTensors) call.places.assign(count, -1);
        }
    }

    // Values are small numbers, and the memory is exactly theirs.
    static OrtValue value(std::istringstream& words) {
        OrtValue made;
        words >> made.type;
        size_t count = 1;
        for (int64_t dim; words >> dim;) {
            if (dim < 0 || made.dims.size() > 9 || (count *= static_cast<size_t>(dim)) > kMostValues) return OrtValue();
            made.dims.push_back(dim);
        }
        const int type = made.type;
        if (type != linexport::kFloat && type != linexport::kInt64 && type != linexport::kBool) return OrtValue();
        made.bytes.resize(count * bytes_of(type));
        for (size_t i = 0; i < count; ++i) {
            const float number = static_cast<float>(i % 5) * 0.25f;
            const int64_t whole = static_cast<int64_t>(i % 2);
            if (type == linexport::kFloat) std::memcpy(&made.bytes[4 * i], &number, 4);
            if (type == linexport::kInt64) std::memcpy(&made.bytes[8 * i], &whole, 8);
            if (type == linexport::kBool) made.bytes[i] = i % 2 == 0;
        }
        return made;
    }
};

void forget(OrtStatus* status) { delete status; }

// ONNX Runtime opens no graph in which an input has another type than its operator declares.
bool opens(const linexport::Declaration& declaration, const OrtKernelContext& call) {
    for (size_t i = 0; i < call.inputs.size() && i < declaration.inputs.size(); ++i) {
        const int given = call.inputs[i].type, declared = declaration.inputs[i].type;
        const bool any = declared == linexport::kUndefined || given == linexport::kUndefined;
        if (!any && given != (declared < 0 ? linexport::kFloat : declared)) return false;
    }
    return true;
}

}  // namespace

void fuzz(std::string const& input) {
    static bool const filled = (fill_table(), true);
    (void)filled;
    Node node(input);
    if (node.op != "Chain" && node.op != "Tokenwise") return;
    for (const linexport::Declaration& declaration : linexport::declarations()) {
        if (declaration.name != node.op || !opens(declaration, node.call)) continue;
        const linexport::CustomOp own(&declaration, linexport::kFloat, 2);
        void* kernel = nullptr;
        if (OrtStatus* status = own.CreateKernelV2(&own, table, &node.info, &kernel)) return forget(status);
        node.call.threads = 2, node.call.outputs.resize(node.call.places.size());
        for (OrtValue& output : node.call.outputs) output.type = linexport::kFloat;
        forget(own.KernelComputeV2(kernel, &node.call));
        own.KernelDestroy(kernel);
    }
}
