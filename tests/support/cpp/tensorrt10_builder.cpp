// Functions of TensorRT 10's builder and parser, which its lean runtime lacks, so that its Python module loads:
// none of them makes anything.
extern "C" {
void* createInferBuilder_INTERNAL(void*, int) { return nullptr; }
void* createNvOnnxParser_INTERNAL(void*, void*, int) { return nullptr; }
void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int) { return nullptr; }
void* getBuilderPluginRegistry(int) { return nullptr; }
int getNvOnnxParserVersion() { return 0; }
bool initLibNvInferPlugins(void*, char const*) { return true; }
}
