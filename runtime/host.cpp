#include <cstdlib>
#include <fstream>
#include <random>

#include <fmt/format.h>

#include <kvferry/runtime/host.hpp>

namespace kvferry {
namespace {

std::string random_host_id() {
  std::random_device source;
  return fmt::format("random-{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

std::string kernel_host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  if (file >> id && !id.empty()) return id;
  return random_host_id();
}

}  // namespace

HostFacts local_host() {
  // One value per process: two engines of one process are neighbours even when the id is random.
  static const std::string id = kernel_host_id();
  const char* replaced = std::getenv("KVFERRY_HOST_ID");
  return {replaced != nullptr && *replaced != '\0' ? std::string(replaced) : id};
}

}  // namespace kvferry
