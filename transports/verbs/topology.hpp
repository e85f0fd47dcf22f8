// Where devices and memory are in this host: PCIe paths and NUMA nodes, read from sysfs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::verbs {

/// A device's place; empty for devices of software.
struct PciSlot {
  std::string address;            ///< such as "0000:17:00.0"
  std::vector<std::string> path;  ///< from the root complex to the device, as sysfs names it
  int numa_node = -1;             ///< -1 when not told
};

/// How far two places are from each other, nearest first.
enum class Distance : std::uint8_t {
  one_switch,        ///< below one PCIe bridge
  several_switches,  ///< below one root port, over several bridges
  host_bridge,       ///< below one root complex
  numa_node,         ///< of one NUMA node
  unknown,
  another_node
};
std::string_view to_string(Distance distance) noexcept;

Distance distance_between(const PciSlot& one, const PciSlot& other);
Distance distance_from_node(int node, const PciSlot& slot) noexcept;

struct Gpu {
  PciSlot slot;
  std::string vendor;  ///< such as "NVIDIA"
};

class Topology {
 public:
  /// The NUMA node of most of this memory's pages; -1 when it can not be told.
  using NodeOfMemory = std::function<int(const void* data, std::uint64_t bytes)>;

  /// Asks the kernel. Tests give a tree of their own in place of /sys, and an answer for memory.
  explicit Topology(std::filesystem::path sysfs = "/sys", NodeOfMemory node_of_memory = {});

  PciSlot slot_of_rdma_device(const std::string& device) const;
  /// By PCI address; without graphics chips that compute nothing.
  std::vector<Gpu> gpus() const;
  /// Those that are online; {0} where the kernel has no NUMA.
  std::vector<int> numa_nodes() const;
  /// Pages that nobody has touched yet are nowhere.
  int node_of_memory(const void* data, std::uint64_t bytes) const { return node_of_memory_(data, bytes); }

 private:
  PciSlot slot_at(const std::filesystem::path& device) const;

  std::filesystem::path sysfs_;
  NodeOfMemory node_of_memory_;
};

}  // namespace kvferry::verbs
