// The limit on locked memory, which registering most often runs into.
#pragma once

#include <string>

namespace kvferry::verbs {

/// For the end of an error's text: names the limit and how to raise it, if registering memory failed with this
/// errno because of it; else empty.
std::string memlock_hint(int error);

}  // namespace kvferry::verbs
