#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/verbs/memlock.hpp>
#include <kvferry/transports/verbs/registration.hpp>

namespace kvferry::verbs {
namespace {

// Parts meet at page boundaries, as devices like it.
constexpr std::uint64_t part_alignment = 2 << 20;

Status registration_failed(const RegionRecord& region, const Device& device, std::uint64_t bytes, int error) {
  const std::string where = fmt::format("verbs: registering {} bytes of region '{}' with {}: {}", bytes, region.name,
                                        device.facts.name(), std::strerror(error));
  return {Errc::resource_exhausted, where + memlock_hint(error)};
}

/// Both ways to GPU memory have failed.
Status gpu_registration_failed(const RegionRecord& region, const Device& device, std::uint64_t bytes, int dmabuf_error,
                               int plain_error) {
  const std::string tried = region.dmabuf_fd < 0
                                ? std::string("no dma-buf handle was given")
                                : fmt::format("through its dma-buf handle: {}", std::strerror(dmabuf_error));
  return {
      Errc::unsupported,
      fmt::format("verbs: registering {} bytes of GPU memory of region '{}' with {}: {}; plainly: {}. It needs a "
                  "dma-buf handle of the memory with Linux 5.12, rdma-core 34 and a driver that supports it, or the "
                  "kernel module nvidia-peermem",
                  bytes, region.name, device.facts.name(), tried, std::strerror(plain_error))};
}

unsigned access_for(const RegionRecord& region) {
  // The device itself always writes into local memory when we read from a peer.
  unsigned access = IBV_ACCESS_LOCAL_WRITE;
  if (allows(region.access, Access::read)) access |= IBV_ACCESS_REMOTE_READ;
  if (allows(region.access, Access::write)) access |= IBV_ACCESS_REMOTE_WRITE;
  return access;
}

}  // namespace

Registrations::Registrations(Api& api, const std::vector<Device>& devices, bool relaxed_ordering,
                             const Topology& topology)
    : api_(api),
      devices_(devices),
      relaxed_ordering_(relaxed_ordering ? IBV_ACCESS_RELAXED_ORDERING : 0),
      topology_(topology) {}

Registrations::~Registrations() {
  for (const auto& [key, registration] : all_) release(*registration);
}

Result<std::string> Registrations::add(const RegionRecord& region) {
  auto made = std::make_unique<Registration>();
  std::vector<RegionKeys> remote(devices_.size());
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    made->local.emplace_back();
    if (Status status = add_to_device(region, devices_[i], *made, remote[i]); !status) {
      release(*made);
      return status;
    }
  }
  measure_distances(region, *made);
  std::string descriptor = encode_keys(remote);
  const std::lock_guard lock(mutex_);
  all_[number_of(region.key)] = std::move(made);
  return descriptor;
}

// After registering: that has touched the pages.
void Registrations::measure_distances(const RegionRecord& region, Registration& made) const {
  const bool one_choice = devices_.size() < 2 || region.kind != MemoryKind::host;
  const int node = one_choice ? -1 : topology_.node_of_memory(region.data, region.size);
  for (const Device& device : devices_) made.distances.push_back(distance_from_node(node, device.facts.slot));
  if (node < 0) return;
  std::string text;
  for (std::size_t i = 0; i < devices_.size(); ++i)
    text += fmt::format("{}{} ({})", i == 0 ? "" : ", ", devices_[i].facts.name(), to_string(made.distances[i]));
  log(LogLevel::debug, fmt::format("verbs: region '{}' is on NUMA node {}: {}", region.name, node, text));
}

Result<ibv_mr*> Registrations::register_part(const RegionRecord& region, const Device& device, std::uint64_t offset,
                                             std::uint64_t bytes) const {
  ibv_pd* domain = device.context->domain();
  const unsigned access = access_for(region) | relaxed_ordering_;
  int dmabuf_error = 0;
  if (region.dmabuf_fd >= 0) {
    ibv_mr* part = api_.reg_dmabuf_mr(domain, region.dmabuf_offset + offset, bytes,
                                      reinterpret_cast<std::uintptr_t>(region.data) + offset, region.dmabuf_fd,
                                      static_cast<int>(access));
    if (part != nullptr) return part;
    dmabuf_error = errno;
  }
  // With nvidia-peermem the kernel knows GPU addresses too.
  if (ibv_mr* part = api_.reg_mr(domain, region.data + offset, bytes, access)) return part;
  if (region.kind == MemoryKind::cuda) return gpu_registration_failed(region, device, bytes, dmabuf_error, errno);
  return registration_failed(region, device, bytes, errno);
}

Status Registrations::add_to_device(const RegionRecord& region, const Device& device, Registration& made,
                                    RegionKeys& remote) const {
  RegionKeys& local = made.local.back();
  const std::uint64_t largest = device.context->limits().max_mr_size;
  local.address = reinterpret_cast<std::uintptr_t>(region.data);
  local.size = region.size;
  local.part_bytes = region.size;
  if (largest > 0 && region.size > largest)
    local.part_bytes = largest >= part_alignment ? largest - largest % part_alignment : largest;
  if (region.size / local.part_bytes >= most_parts)
    return {Errc::too_large,
            fmt::format(
                "verbs: region '{}' of {} bytes would take {} registrations with {}, whose largest is {} bytes; "
                "the most is {}",
                region.name, region.size, region.size / local.part_bytes, device.facts.name(), largest, most_parts)};
  remote = local;
  for (std::uint64_t offset = 0; offset < region.size; offset += local.part_bytes) {
    const std::uint64_t bytes = std::min(local.part_bytes, region.size - offset);
    auto part = register_part(region, device, offset, bytes);
    if (!part) return part.status();
    made.parts.push_back(*part);
    local.keys.push_back((*part)->lkey);
    remote.keys.push_back((*part)->rkey);
  }
  return {};
}

void Registrations::remove(RegionKey region) {
  std::unique_ptr<Registration> gone;
  {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(number_of(region));
    if (found == all_.end()) return;
    gone = std::move(found->second);
    all_.erase(found);
  }
  release(*gone);
}

void Registrations::release(const Registration& registration) const {
  for (ibv_mr* part : registration.parts) api_.dereg_mr(part);
}

const Registration* Registrations::find(RegionKey region) const {
  const std::lock_guard lock(mutex_);
  const auto found = all_.find(number_of(region));
  return found == all_.end() ? nullptr : found->second.get();
}

}  // namespace kvferry::verbs
