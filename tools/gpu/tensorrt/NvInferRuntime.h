// A stand-in for TensorRT's interface of plugins (version 3), with what plugin.cpp and plugin_c.cpp use
// of it, in an order of its own: for compiling both together where the real headers are not.
#pragma once
#include <cstddef>
#include <cstdint>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64 };
enum class TensorFormat : int32_t { kLINEAR, kCHW2 };
enum class PluginFieldType : int32_t { kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR };
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };

struct Dims {
    int32_t nbDims;
    int64_t d[8];
};
struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};
struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min, max, opt;
};
struct PluginField {
    AsciiChar const* name{};
    void const* data{};
    PluginFieldType type{};
    int32_t length{};
};
struct PluginFieldCollection {
    int32_t nbFields{};
    PluginField const* fields{};
};

class ILogger {
public:
    enum class Severity : int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, AsciiChar const* text) noexcept = 0;
    virtual ~ILogger() = default;
};
class ILoggerFinder {
public:
    virtual ILogger* findLogger() noexcept = 0;
    virtual ~ILoggerFinder() = default;
};

class IPluginResourceContext;
enum class DimensionOperation : int32_t;
class IDimensionExpr;
namespace apiv {
class VDimensionExpr;
class VExprBuilder {
public:
    virtual IDimensionExpr const* constant(int64_t value) = 0;
    virtual IDimensionExpr const* operation(
        DimensionOperation of, IDimensionExpr const& first, IDimensionExpr const& second) = 0;
    virtual IDimensionExpr const* declareSizeTensor(
        int32_t output, IDimensionExpr const& optimum, IDimensionExpr const& upper) = 0;
    virtual ~VExprBuilder() = default;
};
}  // namespace apiv
class IDimensionExpr {
protected:
    apiv::VDimensionExpr* mImpl;
    virtual ~IDimensionExpr() = default;
};
class IExprBuilder {
public:
    IDimensionExpr const* constant(int64_t value) noexcept { return mImpl->constant(value); }

protected:
    apiv::VExprBuilder* mImpl;
    virtual ~IExprBuilder() = default;
};
struct DimsExprs {
    int32_t nbDims;
    IDimensionExpr const* d[8];
};

class IPluginCapability {
public:
    virtual ~IPluginCapability() = default;
};
class IPluginV3 {
public:
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
    virtual ~IPluginV3() = default;
};
class IPluginV3OneCore : public IPluginCapability {
public:
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};
class IPluginV3OneBuild : public IPluginCapability {
public:
    using Described = DynamicPluginTensorDesc const*;
    virtual int32_t configurePlugin(Described, int32_t, Described, int32_t) noexcept = 0;
    virtual int32_t getOutputDataTypes(
        DataType* types, int32_t count, DataType const* inputs, int32_t inputCount) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t inputCount, DimsExprs const* values,
        int32_t valueCount, DimsExprs* outputs, int32_t count, IExprBuilder& builder) noexcept = 0;
    virtual bool supportsFormatCombination(
        int32_t position, Described tensors, int32_t inputCount, int32_t outputCount) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(Described, int32_t, Described, int32_t) const noexcept { return 0; }
};
class IPluginV3OneRuntime : public IPluginCapability {
public:
    using Described = PluginTensorDesc const*;
    virtual int32_t onShapeChange(Described, int32_t, Described, int32_t) noexcept = 0;
    virtual int32_t enqueue(Described inputs, Described outputs, void const* const* places,
        void* const* written, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface {
public:
    virtual ~IPluginCreatorInterface() = default;
};
class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    virtual IPluginV3* createPlugin(
        AsciiChar const* name, PluginFieldCollection const* fields, TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

}  // namespace nvinfer1
