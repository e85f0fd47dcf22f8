#include <cerrno>

#include <fmt/format.h>
#include <sys/resource.h>

#include <kvferry/transports/verbs/memlock.hpp>

namespace kvferry::verbs {
namespace {

std::string limit_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return fmt::format("{} KiB", limit.rlim_cur >> 10);
}

}  // namespace

std::string memlock_hint(int error) {
  if (error != ENOMEM && error != EAGAIN && error != EPERM) return {};
  return fmt::format(
      "; registered memory counts against RLIMIT_MEMLOCK, which is {} (ulimit -l; LimitMEMLOCK= in systemd; --ulimit "
      "memlock= in containers)",
      limit_text());
}

}  // namespace kvferry::verbs
