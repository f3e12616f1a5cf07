// linexport's plugins as IPluginV3: see linexport/plugins/tensorrt/plugin.py. One class runs any op:
// what it needs is in the description that its node, and then the engine, carries.
#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <memory>

#include "launcher.h"

namespace linexport {
namespace {

using namespace nvinfer1;

nvinfer1::ILoggerFinder* gFinder = nullptr;

void report(std::exception const& error) noexcept {
    ILogger* const logger = gFinder ? gFinder->findLogger() : nullptr;
    if (logger) logger->log(ILogger::Severity::kERROR, error.what());
}

DataType dataType(std::string const& type) {
    if (type == "fp32") return DataType::kFLOAT;
    if (type == "fp16") return DataType::kHALF;
    if (type == "bf16") return DataType::kBF16;
    if (type == "i8") return DataType::kBOOL;
    throw Error("a node has the unknown type " + type);
}

std::vector<int64_t> listed(Dims const& dims) {
    return {dims.d, dims.d + std::max<int32_t>(dims.nbDims, 0)};
}

std::vector<std::vector<int64_t>> shapes(PluginTensorDesc const* tensors, int32_t count) {
    std::vector<std::vector<int64_t>> found;
    for (int32_t i = 0; i < count; ++i) found.push_back(listed(tensors[i].dims));
    return found;
}

std::vector<std::vector<int64_t>> largest(DynamicPluginTensorDesc const* tensors, int32_t count) {
    std::vector<std::vector<int64_t>> found;
    for (int32_t i = 0; i < count; ++i) found.push_back(listed(tensors[i].max));
    return found;
}

// Exceptions end at TensorRT's border: -1 is failure there.
template <typename Function>
int32_t guarded(Function const& function) noexcept {
    try {
        function();
        return 0;
    } catch (std::exception const& error) {
        report(error);
        return -1;
    }
}

struct Texts {
    std::string launch, binaries;
};

class Plugin final : public IPluginV3,
                     public IPluginV3OneCore,
                     public IPluginV3OneBuild,
                     public IPluginV3OneRuntime {
public:
    explicit Plugin(Texts texts)
        : Plugin(std::make_shared<Texts>(texts), described(texts.launch, texts.binaries)) {}

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    IPluginV3* clone() noexcept override { return new Plugin(mTexts, mDescription); }

    AsciiChar const* getPluginName() const noexcept override { return mDescription->opType.c_str(); }
    AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    AsciiChar const* getPluginNamespace() const noexcept override { return "linexport"; }

    int32_t getNbOutputs() const noexcept override {
        return static_cast<int32_t>(mDescription->outputs.size());
    }
    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t inputCount,
        DynamicPluginTensorDesc const*, int32_t) noexcept override {
        return guarded([&] {
            checkCount(inputCount);
            mDescription->sizes(largest(inputs, inputCount));
        });
    }
    int32_t getOutputDataTypes(
        DataType* types, int32_t count, DataType const*, int32_t) const noexcept override {
        return guarded([&] {
            for (int32_t i = 0; i < count; ++i) types[i] = dataType(mDescription->outputs.at(i).type);
        });
    }
    int32_t getOutputShapes(DimsExprs const* inputs, int32_t inputCount, DimsExprs const*, int32_t,
        DimsExprs* outputs, int32_t count, IExprBuilder& builder) noexcept override {
        return guarded([&] {
            std::map<std::string, IDimensionExpr const*> known;
            for (int32_t i = 0; i < inputCount; ++i) {
                Tensor const& tensor = mDescription->inputs.at(i);
                if (tensor.present && inputs[i].nbDims != static_cast<int32_t>(tensor.shape.size()))
                    throw Error(mDescription->opType + ": " + tensor.name + " has another rank");
                for (size_t axis = 0; axis < tensor.shape.size(); ++axis)
                    if (!tensor.shape[axis].symbol.empty())
                        known.emplace(tensor.shape[axis].symbol, inputs[i].d[axis]);
            }
            for (int32_t i = 0; i < count; ++i) {
                auto const& shape = mDescription->outputs.at(i).shape;
                outputs[i].nbDims = static_cast<int32_t>(shape.size());
                for (size_t axis = 0; axis < shape.size(); ++axis)
                    outputs[i].d[axis] = shape[axis].symbol.empty()
                        ? builder.constant(shape[axis].number)
                        : known.at(shape[axis].symbol);
            }
        });
    }
    bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors,
        int32_t inputCount, int32_t) noexcept override {
        PluginTensorDesc const& found = tensors[position].desc;
        bool fits = false;
        guarded([&] {
            Tensor const& tensor = position < inputCount
                ? mDescription->inputs.at(position)
                : mDescription->outputs.at(position - inputCount);
            // A stand-in for nothing is a copy of the first input.
            std::string const& type = tensor.present ? tensor.type : mDescription->inputs.at(0).type;
            fits = found.format == TensorFormat::kLINEAR && found.type == dataType(type);
        });
        return fits;
    }
    size_t getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t inputCount,
        DynamicPluginTensorDesc const*, int32_t) const noexcept override {
        size_t most = 0;
        guarded([&] {
            Sizes const sizes = mDescription->sizes(largest(inputs, inputCount));
            most = static_cast<size_t>(mDescription->mostScratch(sizes.at("batch"), sizes.at("length")));
        });
        return most;
    }

    int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t inputCount, PluginTensorDesc const*,
        int32_t) noexcept override {
        mShaped = false;
        return guarded([&] {
            checkCount(inputCount);
            mDescription->sizes(shapes(inputs, inputCount));
            mShaped = true;
        });
    }
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
        // Here, not at the first launch, which may be one that a graph captures.
        std::unique_ptr<Plugin> attached{new Plugin(mTexts, mDescription)};
        int32_t const failed = guarded(
            [&] { attached->mLauncher = std::make_unique<Launcher>(*attached->mDescription); });
        return failed ? nullptr : attached.release();
    }
    int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        return guarded([&] {
            if (!mShaped) throw Error(mDescription->opType + ": its inputs are not those described");
            int32_t const count = static_cast<int32_t>(mDescription->inputs.size());
            std::vector<void const*> addresses(inputs, inputs + count);
            addresses.insert(addresses.end(), outputs, outputs + mDescription->outputs.size());
            mLauncher->enqueue(
                shapes(inputDesc, count), addresses, workspace, stream);
        });
    }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        mFields = {field("launch", mTexts->launch), field("binaries", mTexts->binaries)};
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
        return &mCollection;
    }

private:
    Plugin(std::shared_ptr<Texts const> texts, std::shared_ptr<Description const> description)
        : mTexts(std::move(texts)), mDescription(std::move(description)) {}

    // A node may have been given to another description.
    void checkCount(int32_t inputs) const {
        if (inputs != static_cast<int32_t>(mDescription->inputs.size()))
            throw Error(mDescription->opType + " has " + std::to_string(inputs) + " inputs, not those described");
    }
    static PluginField field(char const* name, std::string const& text) {
        return {name, text.data(), PluginFieldType::kCHAR, static_cast<int32_t>(text.size())};
    }

    std::shared_ptr<Texts const> mTexts;
    std::shared_ptr<Description const> mDescription;
    std::unique_ptr<Launcher> mLauncher;
    std::array<PluginField, 2> mFields;
    PluginFieldCollection mCollection{};
    bool mShaped = false;  // the sizes of this call are known to fit
};

class Creator final : public IPluginCreatorV3One {
public:
    explicit Creator(char const* name) : mName(name) {}

    IPluginV3* createPlugin(
        AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override {
        Plugin* made = nullptr;
        guarded([&] {
            Texts texts;
            for (int32_t i = 0; i < fields->nbFields; ++i) {
                PluginField const& field = fields->fields[i];
                std::string const name = field.name ? field.name : "";
                if ((name != "launch" && name != "binaries") || !field.data || field.length < 0) continue;
                std::string text(static_cast<char const*>(field.data), static_cast<size_t>(field.length));
                // Attributes of type string come with a zero byte behind.
                text.erase(text.find_last_not_of('\0') + 1);
                (name == "launch" ? texts.launch : texts.binaries) = std::move(text);
            }
            made = new Plugin(std::move(texts));
        });
        return made;
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    AsciiChar const* getPluginName() const noexcept override { return mName; }
    AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    AsciiChar const* getPluginNamespace() const noexcept override { return "linexport"; }

private:
    char const* mName;
    std::array<PluginField, 2> mFields{PluginField{"launch", nullptr, PluginFieldType::kCHAR, 0},
        PluginField{"binaries", nullptr, PluginFieldType::kCHAR, 0}};
    PluginFieldCollection mCollection{static_cast<int32_t>(mFields.size()), mFields.data()};
};

}  // namespace
}  // namespace linexport

#define LINEXPORT_EXPORTED extern "C" __attribute__((visibility("default")))

LINEXPORT_EXPORTED void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    linexport::gFinder = finder;
}

LINEXPORT_EXPORTED nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static linexport::Creator attention{"LinearAttention"}, conv{"CausalConvTokens"}, map{"FeatureMap"},
        exponential{"StabilizedExp"}, layer{"LinearAttentionLayer"};
    static std::array<nvinfer1::IPluginCreatorInterface*, 5> creators{
        &attention, &conv, &map, &exponential, &layer};
    count = static_cast<int32_t>(creators.size());
    return creators.data();
}
