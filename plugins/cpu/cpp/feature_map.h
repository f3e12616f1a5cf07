// Feature maps that kernels apply themselves.
#pragma once

#include <string>

namespace linexport {

enum class Map { kIdentity, kElu1, kExp, kRelu, kSquaredRelu, kSoftplus };

// The map of that name, "" being the identity; an Error names it where there is none.
Map map_named(const std::string& name);

}  // namespace linexport
