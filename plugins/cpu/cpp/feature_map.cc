#include "feature_map.h"

#include "operator.h"

namespace linexport {

Map map_named(const std::string& name) {
  if (name.empty() || name == "identity") return Map::kIdentity;
  if (name == "elu1") return Map::kElu1;
  if (name == "exp") return Map::kExp;
  if (name == "relu") return Map::kRelu;
  if (name == "squared_relu") return Map::kSquaredRelu;
  if (name == "softplus") return Map::kSoftplus;
  throw Error("the feature map \"" + name + "\" is not computed by the CPU library");
}

}  // namespace linexport
