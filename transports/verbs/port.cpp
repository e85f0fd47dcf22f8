#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/verbs/port.hpp>

namespace kvferry::verbs {
namespace {

constexpr std::size_t completions_per_poll = 64;
// What a device of the memory's own NUMA node is given before one across the sockets' link gets anything: some
// microseconds' worth of a fast rail, so that small batches stay near and large ones use every rail.
constexpr std::uint64_t other_node_detour_bytes = 512 << 10;
constexpr std::uint32_t polls_per_look = 1024;  // at the device's state, which is a system call
// Rests while the device refuses for want of memory.
constexpr auto shortage_rest = std::chrono::microseconds(100);

std::string address_of(const std::vector<Device>& devices, std::uint16_t cm_port) {
  PortAddress address;
  address.cm_port = cm_port;
  address.port = random_number();
  for (const Device& device : devices)
    address.devices.push_back(
        {device.facts.name(), device.facts.ethernet, device.facts.lid, device.mtu, device.facts.gids});
  return encode(address);
}

}  // namespace

Result<std::unique_ptr<Port>> VerbsPort::open(const VerbsConfig& config, const std::vector<Device>& devices,
                                              const Registrations& registrations, const PortContext& context,
                                              PortEvents& events) {
  std::unique_ptr<VerbsPort> port(new VerbsPort(config, devices, registrations, context, events));
  if (Status status = port->start(); !status) return status;
  return std::unique_ptr<Port>(std::move(port));
}

Status VerbsPort::start() {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) return {Errc::resource_exhausted, fmt::format("verbs: epoll_create1: {}", std::strerror(errno))};
  for (std::size_t i = 0; i < parts_.devices.size(); ++i) {
    auto side = DeviceSide::create(parts_.devices[i], static_cast<std::uint32_t>(i));
    if (!side) return side.status();
    if (Status status = watch((*side)->completions->event_fd()); !status) return status;
    if (Status status = watch(parts_.devices[i].context->event_fd()); !status) return status;
    parts_.sides.push_back(std::move(*side));
  }
  if (parts_.config.connect == VerbsConnect::rdmacm)
    if (Status status = start_cm(); !status) return status;
  address_ = address_of(parts_.devices, parts_.cm ? parts_.cm->port() : std::uint16_t{0});
  return {};
}

Status VerbsPort::start_cm() {
  auto cm = CmEvents::create(parts_.devices.front(), server_);
  if (!cm) return cm.status();
  parts_.cm = std::move(*cm);
  return watch(parts_.cm->event_fd());
}

Status VerbsPort::watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0 || errno == EEXIST) return {};
  return {Errc::resource_exhausted, fmt::format("verbs: epoll_ctl: {}", std::strerror(errno))};
}

VerbsPort::~VerbsPort() {
  channels_.clear();
  if (epoll_ >= 0) ::close(epoll_);
}

PortLimits VerbsPort::limits() const {
  PortLimits limits;
  limits.item_bytes = parts_.config.chunk_bytes;
  limits.item_slices = 1024;
  limits.whole_bytes = std::min(limits.whole_bytes, limits.item_bytes);
  limits.channel_items = most_channel_items;
  return limits;
}

Channel* VerbsPort::find(ChannelId id) {
  const auto found = channels_.find(id);
  return found == channels_.end() ? nullptr : found->second.get();
}

Result<ChannelId> VerbsPort::open(const ChannelSpec& spec) {
  auto channel = std::make_unique<Channel>(next_channel_, spec, parts_);
  if (Status status = channel->ask(); !status) return status;
  by_wire_id_.emplace(channel->wire_id(), channel.get());
  channels_.emplace(next_channel_, std::move(channel));
  ++changing_;
  return next_channel_++;
}

std::uint64_t VerbsPort::detour_bytes(ChannelId channel, const RegionRecord& local) const {
  if (parts_.sides.size() < 2) return 0;
  const auto found = channels_.find(channel);
  const Registration* registration = parts_.registrations.find(local.key);
  if (found == channels_.end() || registration == nullptr) return 0;
  const Distance distance = registration->distances[found->second->side().index];
  return distance == Distance::another_node ? other_node_detour_bytes : 0;
}

std::size_t VerbsPort::post(ChannelId channel, std::span<const WorkItem> items) {
  Channel* found = find(channel);
  if (found == nullptr) return 0;
  const std::size_t taken = found->post(items);
  if (taken > 0 && !std::exchange(found->listed_busy, true)) busy_.push_back(found);
  return taken;
}

void VerbsPort::cancel(ChannelId channel, std::uint64_t cookie) {
  if (Channel* found = find(channel)) found->cancel(cookie);
}

void VerbsPort::fence(ChannelId channel, const Status& why) {
  if (Channel* found = find(channel)) {
    found->begin_end(why);
    changing_ = std::max<std::size_t>(changing_, 1);
  }
}

void VerbsPort::on_answer(ChannelId channel, const Result<std::string>& answer) {
  // Channels report from inside poll() only.
  answers_.emplace_back(channel, answer);
  changing_ = std::max<std::size_t>(changing_, 1);
}

Result<std::string> VerbsPort::serve(std::string_view request) { return server_.serve(request); }

bool VerbsPort::release_region(RegionKey /*region*/, bool /*force*/) {
  // Peers' devices reach the region until it is deregistered, which no port can help; that call returns
  // when they can not any more.
  return true;
}

// ---------------------------------------------------------------- polling

std::size_t VerbsPort::poll(std::span<Completion> completions) {
  for (auto& [channel, answer] : std::exchange(answers_, {}))
    if (Channel* found = find(channel)) found->on_answer(answer);
  for (const auto& [side, completion] : std::exchange(stash_, {})) handle(*side, completion);
  const bool look = ++polls_ % polls_per_look == 0 || slept_;
  slept_ = false;
  for (const auto& side : parts_.sides) {
    take_completions(*side);
    if (look) look_at_device(*side);
  }
  work_on_busy();
  // Reading them is a system call.
  const bool look_at_cm = look || changing_ > 0 || server_.connecting();
  if (parts_.cm && look_at_cm && parts_.cm->poll()) changing_ = std::max<std::size_t>(changing_, 1);
  server_.tick();
  if (changing_ > 0) tick_channels();
  hand_over_requests();
  return parts_.finished.hand_over(completions);
}

void VerbsPort::work_on_busy() {
  for (Channel* channel : busy_) {
    if (channel->has_items()) {
      channel->pump();
      channel->probe();
    }
    channel->listed_busy = channel->has_items();
  }
  std::erase_if(busy_, [](const Channel* channel) { return !channel->listed_busy; });
}

std::size_t VerbsPort::take_completions(DeviceSide& side) {
  std::array<ibv_wc, completions_per_poll> found;
  const int count = side.completions->poll(found);
  if (count < 0) {
    side.lost = true;
    look_at_device(side);
    return 0;
  }
  for (int i = 0; i < count; ++i) handle(side, found[static_cast<std::size_t>(i)]);
  return static_cast<std::size_t>(count);
}

void VerbsPort::handle(DeviceSide& side, const ibv_wc& completion) {
  const auto tag = static_cast<std::uint32_t>(completion.wr_id >> 32);
  if (tag == small_receives_tag || tag == large_receives_tag) return on_arrival(side, completion);
  const auto owner = parts_.owners.find(tag);
  if (owner == parts_.owners.end()) return;
  owner->second.second->on_sent(*owner->second.first, completion);
  if (completion.status != IBV_WC_SUCCESS) changing_ = std::max<std::size_t>(changing_, 1);
}

void VerbsPort::on_arrival(DeviceSide& side, const ibv_wc& completion) {
  const bool large = static_cast<std::uint32_t>(completion.wr_id >> 32) == large_receives_tag;
  ReceiveQueue& from = large ? *side.large_receives : *side.small_receives;
  const auto buffer = static_cast<std::uint32_t>(completion.wr_id);
  if (completion.status != IBV_WC_SUCCESS || completion.byte_len < head_bytes) return from.post(buffer);
  const Head head = decode_head(from.data(buffer));
  if (head.bytes != completion.byte_len - head_bytes || head.bytes > max_message_bytes) return from.post(buffer);
  if (head.kind == HeadKind::accepted) {
    const auto channel = by_wire_id_.find(head.channel);
    const std::uint32_t count = std::min<std::uint32_t>(head.immediate, head.bytes / sizeof(std::uint32_t));
    if (channel != by_wire_id_.end())
      for (std::uint32_t i = 0; i < count; ++i)
        channel->second->on_accepted(decode_number(from.data(buffer) + head_bytes + i * sizeof(std::uint32_t)));
    return from.post(buffer);
  }
  const bool known = head.kind == HeadKind::message || head.kind == HeadKind::notification;
  if (!known) return from.post(buffer);
  server_.on_arrival(from, buffer, head);
}

/// What has happened to the device since: a port that went down takes its channels along.
void VerbsPort::look_at_device(DeviceSide& side) {
  const Context& context = *side.device.context;
  side.device.context->read_events();
  const std::uint32_t losses = context.port_losses(side.device.facts.port);
  if (losses == side.port_losses && !context.lost() && !side.lost) return;
  side.port_losses = losses;
  const Status why(Errc::channel_error, context.lost() || side.lost
                                            ? fmt::format("verbs: device {} has failed", side.device.facts.name())
                                            : fmt::format("verbs: {} went down", side.device.facts.name()));
  for (const auto& [id, channel] : channels_)
    if (&channel->side() == &side) channel->begin_end(why);
  changing_ = std::max<std::size_t>(changing_, 1);
}

void VerbsPort::hand_over_requests() {
  for (auto& [channel, request] : std::exchange(parts_.exchanges, {}))
    parts_.events.on_request(channel, std::move(request));
}

void VerbsPort::tick_channels() {
  const TimePoint now = parts_.now();
  changing_ = 0;
  for (auto at = channels_.begin(); at != channels_.end();) {
    Channel& channel = *at->second;
    channel.tick(now);
    if (!channel.ended()) {
      if (!channel.up()) ++changing_;
      ++at;
      continue;
    }
    const std::unique_ptr<Channel> gone = std::move(at->second);
    at = channels_.erase(at);
    by_wire_id_.erase(gone->wire_id());
    std::erase(busy_, gone.get());
    parts_.events.on_channel_down(gone->id(), gone->why());
  }
}

// ---------------------------------------------------------------- sleeping

Progress VerbsPort::progress() const {
  if (!parts_.finished.empty() || !answers_.empty() || !parts_.exchanges.empty() || !stash_.empty())
    return Progress::runnable;
  if (changing_ > 0 || server_.stalled() || server_.runnable()) return Progress::waiting;
  return busy_.empty() ? Progress::idle : Progress::waiting;
}

TimePoint VerbsPort::next_wakeup() const {
  // Whoever asks is about to sleep until wait_fd() is readable. What completed before the queues were armed
  // rings nothing, so they are looked at once more.
  slept_ = true;
  for (const auto& side : parts_.sides) {
    side->completions->arm();
    std::array<ibv_wc, completions_per_poll> found;
    const int count = side->completions->poll(found);
    for (int i = 0; i < count; ++i) stash_.emplace_back(side.get(), found[static_cast<std::size_t>(i)]);
  }
  const TimePoint now = parts_.now();
  if (!stash_.empty()) return now;
  TimePoint next = TimePoint::max();
  // An engine that had no room rings no bell when it has.
  if (server_.stalled()) next = now + std::chrono::milliseconds(1);
  if (server_.runnable()) next = now + shortage_rest;
  for (const Channel* channel : busy_) {
    if (channel->runnable()) next = std::min<TimePoint>(next, now + shortage_rest);
    if (channel->awaits_acceptance()) next = std::min(next, channel->next_wakeup());
  }
  if (changing_ > 0)
    for (const auto& [id, channel] : channels_) next = std::min(next, channel->next_wakeup());
  return next;
}

}  // namespace kvferry::verbs
