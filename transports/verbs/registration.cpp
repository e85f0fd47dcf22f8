#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <kvferry/transports/verbs/memlock.hpp>
#include <kvferry/transports/verbs/registration.hpp>

namespace kvferry::verbs {
namespace {

// Parts meet at page boundaries, as devices like it.
constexpr std::uint64_t part_alignment = 2 << 20;

Status registration_failed(const RegionRecord& region, const Device& device, std::uint64_t bytes, int error) {
  const std::string where = fmt::format("verbs: registering {} bytes of region '{}' with {}: {}", bytes, region.name,
                                        device.facts.name(), std::strerror(error));
  if (region.kind == MemoryKind::cuda)
    return {Errc::unsupported, where + "; GPU memory needs the kernel module nvidia-peermem, or dma-buf"};
  return {Errc::resource_exhausted, where + memlock_hint(error)};
}

unsigned access_for(const RegionRecord& region) {
  // The device itself always writes into local memory when we read from a peer.
  unsigned access = IBV_ACCESS_LOCAL_WRITE;
  if (allows(region.access, Access::read)) access |= IBV_ACCESS_REMOTE_READ;
  if (allows(region.access, Access::write)) access |= IBV_ACCESS_REMOTE_WRITE;
  return access;
}

}  // namespace

Registrations::Registrations(Api& api, const std::vector<Device>& devices, bool relaxed_ordering)
    : api_(api), devices_(devices), relaxed_ordering_(relaxed_ordering ? IBV_ACCESS_RELAXED_ORDERING : 0) {}

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
  std::string descriptor = encode_keys(remote);
  const std::lock_guard lock(mutex_);
  all_[number_of(region.key)] = std::move(made);
  return descriptor;
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
    ibv_mr* part =
        api_.reg_mr(device.context->domain(), region.data + offset, bytes, access_for(region) | relaxed_ordering_);
    if (part == nullptr) return registration_failed(region, device, bytes, errno);
    made.parts.push_back(part);
    local.keys.push_back(part->lkey);
    remote.keys.push_back(part->rkey);
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
