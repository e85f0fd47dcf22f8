// Memory that a peer reads or writes on its own: no thread of this process orders these accesses.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace kvferry {

/// While it lives, ThreadSanitizer ignores what this thread does to memory. A target's program learns from
/// its peer when it may look at a region, which the sanitizer can not know: it would take every byte for
/// a race. Costs nothing in other builds.
class OneSidedAccess {
 public:
#if defined(__SANITIZE_THREAD__)
  OneSidedAccess() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~OneSidedAccess() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  OneSidedAccess() = default;
  ~OneSidedAccess() {}  // NOLINT(modernize-use-equals-default): a trivial one would be an unused variable
#endif
  OneSidedAccess(const OneSidedAccess&) = delete;
  OneSidedAccess& operator=(const OneSidedAccess&) = delete;
};

}  // namespace kvferry
