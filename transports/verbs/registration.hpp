// Memory that RDMA devices may touch: one set of memory regions (MRs) per region and device, cut into
// parts where a device's largest MR asks for it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/device.hpp>

namespace kvferry::verbs {

/// A registration as one number.
inline std::uint64_t number_of(RegionKey key) noexcept { return std::uint64_t{key.generation} << 32 | key.slot; }

/// The keys of one region on one device. Parts are of equal size, the last may be shorter.
struct RegionKeys {
  std::uint64_t address = 0;     ///< of the region's first byte, as the device knows it
  std::uint64_t size = 0;        ///< bytes
  std::uint64_t part_bytes = 0;  ///< of each part but the last
  std::vector<std::uint32_t> keys;

  // A division costs as much as the rest of a request, and most regions have one part.
  std::uint32_t key_at(std::uint64_t offset) const noexcept {
    return offset < part_bytes ? keys.front() : keys[offset / part_bytes];
  }
  /// How far a request that begins at `offset` may go without leaving its part.
  std::uint64_t room_at(std::uint64_t offset) const noexcept {
    return part_bytes - (offset < part_bytes ? offset : offset % part_bytes);
  }
};

/// A region's local keys on every device, in the order of the devices.
struct Registration {
  std::vector<RegionKeys> local;
  std::vector<ibv_mr*> parts;
  std::vector<Distance> distances;  ///< from the region's memory to each device
};

/// Most parts of one region on one device.
inline constexpr std::size_t most_parts = 4096;

/// All registrations of a transport. Thread-safe.
class Registrations {
 public:
  Registrations(Api& api, const std::vector<Device>& devices, bool relaxed_ordering, const Topology& topology);
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  /// Registers with every device; returns the descriptor for peers. Errors name the limit that was hit.
  Result<std::string> add(const RegionRecord& region);
  /// When this returns, no device can touch the region any more.
  void remove(RegionKey region);
  /// Valid until the region is removed; nullptr when it is not registered.
  const Registration* find(RegionKey region) const;

 private:
  void measure_distances(const RegionRecord& region, Registration& made) const;
  Result<ibv_mr*> register_part(const RegionRecord& region, const Device& device, std::uint64_t offset,
                                std::uint64_t bytes) const;
  Status add_to_device(const RegionRecord& region, const Device& device, Registration& made, RegionKeys& remote) const;
  void release(const Registration& registration) const;

  Api& api_;
  const std::vector<Device>& devices_;
  const unsigned relaxed_ordering_;
  const Topology topology_;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Registration>> all_;  ///< by slot and generation
};

/// What a peer was told of a region: its keys on each of the target's devices, in their order.
std::string encode_keys(const std::vector<RegionKeys>& keys);
/// Errors: malformed.
Result<std::vector<RegionKeys>> decode_keys(std::string_view bytes);

}  // namespace kvferry::verbs
