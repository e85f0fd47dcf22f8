// What tests must know of the sanitizers they are built with.
#pragma once

namespace kvferry::test {

/// True where UndefinedBehaviorSanitizer looks at the types of objects. For each type that it has not seen
/// it opens a pipe, and takes failing to for a wrong type: a test that leaves no descriptors can not run.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool types_checked = true;
#else
inline constexpr bool types_checked = false;
#endif

}  // namespace kvferry::test
