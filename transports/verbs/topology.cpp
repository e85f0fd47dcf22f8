#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include <numaif.h>
#include <unistd.h>

#include <kvferry/transports/verbs/topology.hpp>

namespace kvferry::verbs {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t sampled_pages = 64;

std::string read_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

/// 0000:17:00.0
bool is_pci_address(std::string_view name) {
  return name.size() >= 12 && name[name.size() - 2] == '.' && name[name.size() - 5] == ':' &&
         name[name.size() - 8] == ':';
}

int node_by_pages(const void* data, std::uint64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(data) / page * page;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(data) + bytes;
  const std::size_t pages = (end - first + page - 1) / page;
  const std::size_t count = std::min(pages, sampled_pages);
  std::array<void*, sampled_pages> places{};
  std::array<int, sampled_pages> nodes{};
  for (std::size_t i = 0; i < count; ++i) places[i] = reinterpret_cast<void*>(first + pages * i / count * page);
  // Without new nodes the call moves nothing and tells where each page is.
  if (count == 0 || ::move_pages(0, count, places.data(), nullptr, nodes.data(), 0) != 0) return -1;
  std::map<int, std::size_t> votes;
  for (std::size_t i = 0; i < count; ++i)
    if (nodes[i] >= 0) ++votes[nodes[i]];
  const auto most =
      std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == votes.end() ? -1 : most->first;
}

/// "0-1,4" as sysfs writes sets of numbers.
std::vector<int> parse_set(const std::string& text) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int first = 0;
    auto [after, error] = std::from_chars(at, end, first);
    if (error != std::errc()) break;
    int last = first;
    if (after < end && *after == '-') after = std::from_chars(after + 1, end, last).ptr;
    for (int number = first; number <= last; ++number) numbers.push_back(number);
    at = after < end && *after == ',' ? after + 1 : end;
  }
  return numbers;
}

std::string vendor_name(const std::string& id) {
  if (id == "0x10de") return "NVIDIA";
  if (id == "0x1002") return "AMD";
  if (id == "0x8086") return "Intel";
  return id;
}

/// 3D controllers are for computing; display controllers only those of vendors whose cards do both.
bool is_gpu(const std::string& kind, const std::string& vendor) {
  if (kind.starts_with("0x0302")) return true;
  return kind.starts_with("0x0300") && (vendor == "0x10de" || vendor == "0x1002");
}

}  // namespace

std::string_view to_string(Distance distance) noexcept {
  switch (distance) {
    case Distance::one_switch:
      return "same PCIe switch";
    case Distance::several_switches:
      return "several PCIe switches";
    case Distance::host_bridge:
      return "same PCIe root complex";
    case Distance::numa_node:
      return "same NUMA node";
    case Distance::unknown:
      return "unknown";
    case Distance::another_node:
      return "another NUMA node";
  }
  return "unknown";
}

Distance distance_between(const PciSlot& one, const PciSlot& other) {
  const auto [end, unused] = std::mismatch(one.path.begin(), one.path.end(), other.path.begin(), other.path.end());
  const auto common = static_cast<std::size_t>(end - one.path.begin());
  // The root complex is first, the device itself last.
  if (common >= 2 && common + 1 >= std::max(one.path.size(), other.path.size())) return Distance::one_switch;
  if (common >= 2) return Distance::several_switches;
  if (common == 1) return Distance::host_bridge;
  return distance_from_node(one.numa_node, other);
}

Distance distance_from_node(int node, const PciSlot& slot) noexcept {
  if (node < 0 || slot.numa_node < 0) return Distance::unknown;
  return node == slot.numa_node ? Distance::numa_node : Distance::another_node;
}

Topology::Topology(fs::path sysfs, NodeOfMemory node_of_memory)
    : sysfs_(std::move(sysfs)), node_of_memory_(node_of_memory ? std::move(node_of_memory) : node_by_pages) {}

PciSlot Topology::slot_of_rdma_device(const std::string& device) const {
  return slot_at(sysfs_ / "class/infiniband" / device / "device");
}

PciSlot Topology::slot_at(const fs::path& device) const {
  PciSlot slot;
  std::error_code error;
  const fs::path real = fs::canonical(device, error);
  if (error || !is_pci_address(real.filename().string())) return slot;
  slot.address = real.filename();
  for (const fs::path& part : real)
    if (part.string().starts_with("pci") || is_pci_address(part.string())) slot.path.push_back(part);
  const std::string node = read_line(real / "numa_node");
  std::from_chars(node.data(), node.data() + node.size(), slot.numa_node);
  return slot;
}

std::vector<Gpu> Topology::gpus() const {
  std::vector<Gpu> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(sysfs_ / "bus/pci/devices", error)) {
    const std::string vendor = read_line(entry.path() / "vendor");
    if (!is_gpu(read_line(entry.path() / "class"), vendor)) continue;
    found.push_back({slot_at(entry.path()), vendor_name(vendor)});
  }
  std::sort(found.begin(), found.end(), [](const Gpu& a, const Gpu& b) { return a.slot.address < b.slot.address; });
  return found;
}

std::vector<int> Topology::numa_nodes() const {
  std::vector<int> nodes = parse_set(read_line(sysfs_ / "devices/system/node/online"));
  if (nodes.empty()) nodes.push_back(0);
  return nodes;
}

}  // namespace kvferry::verbs
