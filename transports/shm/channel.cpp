#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/runtime/shared_work.hpp>
#include <kvferry/transports/shm/channel.hpp>
#include <kvferry/transports/shm/copy.hpp>

namespace kvferry::shm {
namespace {

constexpr std::uint32_t socket_events = EPOLLIN | EPOLLRDHUP;
/// How soon a full listener is tried again.
constexpr Duration connect_retry = std::chrono::milliseconds(1);
/// What an item without bytes counts in a poll's budget.
constexpr std::uint64_t least_cost = 4096;
/// Smaller transfers and items are copied sooner than a helper wakes up.
constexpr std::uint64_t helper_transfer_bytes = 1 << 20;
constexpr std::uint64_t helper_item_bytes = 64 << 10;
/// Smaller transfers are copied sooner than a waiter has noticed that it could help.
constexpr std::uint64_t least_shared_bytes = 128 << 10;
constexpr std::size_t pieces_at_once = 64;

std::uint64_t number_of(RegionKey key) noexcept { return std::uint64_t{key.slot} << 32 | key.generation; }

std::uint64_t total_of(const WorkItem& work) noexcept { return std::max(work.transfer_bytes, work.slices.bytes); }

Access needed_by(Op op) noexcept { return op == Op::read ? Access::read : Access::write; }

std::string name_of(const WorkItem& work) {
  return fmt::format("shm: {} of region '{}'", to_string(work.op), work.remote->name);
}

}  // namespace

Mapping::~Mapping() {
  if (base != nullptr) ::munmap(base, size);
}

Channel::Channel(ChannelId id, const ChannelSpec& spec, PortParts& parts) : id_(id), spec_(spec), parts_(parts) {
  for (Item& item : items_) {
    item.channel = this;
    unused_.push(&item);
  }
}

Channel::~Channel() {
  for (Item& item : items_) {
    if (!item.shared) continue;
    item.shared->stop({Errc::channel_error, "shm: the channel has ended"});
    // A waiter is inside for one share at most.
    while (!item.shared->none_inside()) ::sched_yield();
    (void)item.shared->close();
  }
  if (page_) page_.close_initiator();
}

// ---- set-up

Status Channel::connect() {
  Result<Fd> socket = connect_to(spec_.address);
  if (!socket) return socket.status();
  return *socket ? greet(std::move(*socket)) : Status();
}

Status Channel::greet(Fd socket) {
  socket_ = std::move(socket);
  if (!parts_.epoll.add(socket_.get(), Watched::channel, id_, socket_events))
    return {Errc::resource_exhausted, fmt::format("shm: epoll: {}", std::strerror(errno))};
  HelloPacket hello;
  hello.token = spec_.token;
  hello.target_incarnation = spec_.target_incarnation;
  if (send_packet(socket_.get(), bytes_of(hello)) != IoResult::done)
    return {Errc::channel_error, "shm: the peer closed the connection before the greeting"};
  state_ = State::greeting;
  return {};
}

Status Channel::on_welcome(const WelcomePacket& packet, Fd page) {
  if (state_ != State::greeting || !page) return {Errc::malformed, "shm: a welcome out of place, or without its page"};
  Result<ControlPage> attached = ControlPage::attach(std::move(page));
  if (!attached) return attached.status();
  page_ = std::move(*attached);
  peer_ = PeerMemory::probe(socket_.get(), packet.nonce_address, packet.nonce, parts_.options.calls);
  if (!peer_.usable())
    log(LogLevel::warning,
        fmt::format("shm: only regions that the peer's engine allocated are shared with process {}: {}", peer_.pid(),
                    peer_.usable().text()));
  if (peer_.pidfd() >= 0) parts_.epoll.add(peer_.pidfd(), Watched::process, id_, EPOLLIN);
  state_ = State::up;
  parts_.events.on_channel_up(id_);
  return {};
}

void Channel::tick(TimePoint now) {
  if (!connecting()) return;
  if (now >= spec_.give_up) {
    fail({Errc::timed_out, fmt::format("shm: the engine behind the abstract socket '{}' did not {} in time",
                                       spec_.address, socket_ ? "answer the greeting" : "accept the connection")});
    return;
  }
  if (state_ != State::connecting) return;
  if (Status status = connect(); !status) fail(status);
}

TimePoint Channel::next_wakeup(TimePoint now) const {
  if (!connecting()) return TimePoint::max();
  return state_ == State::connecting ? std::min(spec_.give_up, now + connect_retry) : spec_.give_up;
}

// ---- what the port's user asks

std::size_t Channel::post(std::span<const WorkItem> items) {
  if (state_ != State::up) return 0;
  std::size_t taken = 0;
  for (const WorkItem& work : items) {
    Item* item = unused_.pop();
    if (item == nullptr) break;
    item->work = work;
    item->checked = false;
    item->sharing = false;
    item->cancelled.store(false, std::memory_order_relaxed);
    item->streaming = choose_copy(total_of(work), parts_.config.streaming_bytes) == CopyKind::streaming;
    item->result = {};
    make_ready(item);
    ++taken;
  }
  parts_.outstanding += taken;
  return taken;
}

void Channel::cancel(std::uint64_t cookie) {
  const auto found = std::find_if(items_.begin(), items_.end(), [&](const Item& item) {
    return item.state != Item::State::unused && item.work.cookie == cookie;
  });
  if (found == items_.end()) return;
  Item& item = *found;
  switch (item.state) {
    case Item::State::ready:
      ready_.remove(&item);
      if (item.sharing) {
        await_waiters(item, {Errc::cancelled, "shm: cancelled before it was copied to the end"});
        return;
      }
      break;
    case Item::State::parked:
      item.mapping->parked.remove(&item);
      break;
    case Item::State::helper:
      item.cancelled.store(true);
      return;
    default:
      return;  // the packet may be with the target already
  }
  finish(item, {Errc::cancelled, "shm: cancelled before it was copied to the end"});
}

void Channel::fail(const Status& why) {
  if (state_ == State::ending || state_ == State::ended) return;
  state_ = State::ending;
  why_ = why;
  stop_.store(true);
  // From here on the target delivers nothing more that it has not read yet.
  if (page_) page_.close_initiator();
  fail_queue(ready_);
  fail_queue(sending_);
  fail_queue(sent_);
  for (auto& [number, mapping] : mappings_) fail_queue(mapping->parked);
  if (in_helpers_ == 0) close_up();
}

void Channel::fail_queue(ItemQueue& queue) {
  while (Item* item = queue.pop()) {
    Status why(Errc::channel_error, std::string(why_.text()));
    if (item->sharing)
      await_waiters(*item, std::move(why));
    else
      finish(*item, std::move(why));
  }
}

void Channel::close_up() {
  // The socket is closed last of all: as long as it is open, the target takes our busy marks for true.
  mappings_.clear();
  if (peer_.pidfd() >= 0) parts_.epoll.remove(peer_.pidfd());
  if (socket_) parts_.epoll.hang_up(socket_.get());
  peer_ = {};
  socket_.reset();
  state_ = State::ended;
  parts_.channel_ended = true;
}

// ---- packets

void Channel::on_socket(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) flush();
  if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) == 0) return;
  for (std::uint32_t count = 0; count < max_unacknowledged && state_ < State::ending; ++count) {
    std::span<std::byte> packet;
    Fd passed;
    switch (receive_packet(socket_.get(), parts_.packet, packet, passed)) {
      case IoResult::done:
        if (Status status = on_packet(packet, std::move(passed)); !status) fail(status);
        break;
      case IoResult::again:
        return;
      case IoResult::closed:
        fail({Errc::channel_error,
              fmt::format("shm: the peer{} closed the channel or has ended",
                          peer_.pid() > 0 ? fmt::format(" (process {})", peer_.pid()) : std::string())});
        return;
      case IoResult::bad:
        fail({Errc::malformed, "shm: the peer sent a packet that is too long or carries too many descriptors"});
        return;
    }
  }
}

void Channel::on_process_end() {
  fail({Errc::channel_error, fmt::format("shm: the peer's process {} has ended", peer_.pid())});
}

Status Channel::on_packet(std::span<const std::byte> packet, Fd passed) {
  const std::optional<PacketHeader> header = header_of(packet);
  if (!header || header->magic != protocol_magic)
    return {Errc::malformed, "shm: the peer does not speak the protocol of kvferry's shared memory"};
  switch (header->kind) {
    case PacketKind::welcome:
      if (auto welcome = decode<WelcomePacket>(packet)) return on_welcome(*welcome, std::move(passed));
      break;
    case PacketKind::refusal:
      if (auto refusal = decode<RefusalPacket>(packet)) {
        const Status why = refusal->why.status();
        return why ? Status(Errc::malformed, "shm: the peer refused the channel and gave no reason") : why;
      }
      break;
    case PacketKind::region_reply:
      if (auto reply = decode<RegionReplyPacket>(packet)) return on_region(*reply, std::move(passed));
      break;
    case PacketKind::region_gone:
      if (auto gone = decode<RegionGonePacket>(packet)) return on_region_gone(*gone);
      break;
    case PacketKind::ack:
      if (auto ack = decode<AckPacket>(packet)) return on_ack(*ack);
      break;
    default:
      break;
  }
  return {Errc::malformed, fmt::format("shm: the peer sent a packet of kind {} and {} bytes that has no place here",
                                       static_cast<unsigned>(header->kind), packet.size())};
}

Status Channel::on_ack(const AckPacket& packet) {
  Item* item = sent_.front();
  while (item != nullptr && item->number != packet.number) item = item->next;
  if (item == nullptr) return {Errc::malformed, "shm: the peer acknowledged something that was not sent"};
  sent_.remove(item);
  finish(*item, {});
  return {};
}

void Channel::flush() {
  if (state_ != State::up) return;
  bool full = !flush_requests();
  while (!full && !sending_.empty()) {
    switch (send_item(*sending_.front())) {
      case IoResult::done: {
        Item* item = sending_.pop();
        item->state = Item::State::sent;
        sent_.push(item);
        break;
      }
      case IoResult::again:
        full = true;
        break;
      default:
        // What the peer sent before it went is still read, and then its end is seen.
        return;
    }
  }
  wait_for_room(full);
}

bool Channel::flush_requests() {
  while (!unasked_.empty()) {
    RegionRequestPacket request;
    request.key = unasked_.back();
    if (send_packet(socket_.get(), bytes_of(request)) == IoResult::again) return false;
    unasked_.pop_back();
  }
  return true;
}

IoResult Channel::send_item(const Item& item) const {
  if (item.work.op == Op::send) {
    MessagePacket packet;
    packet.number = item.number;
    packet.sequence = item.work.sequence;
    return send_packet(socket_.get(), bytes_of(packet), item.work.message);
  }
  NotificationPacket packet;
  packet.number = item.number;
  packet.sequence = item.work.sequence;
  packet.immediate = item.work.immediate;
  return send_packet(socket_.get(), bytes_of(packet));
}

void Channel::wait_for_room(bool wanted) {
  if (wanted == room_wanted_) return;
  room_wanted_ = wanted;
  parts_.epoll.change(socket_.get(), Watched::channel, id_, wanted ? socket_events | EPOLLOUT : socket_events);
}

// ---- regions

Mapping& Channel::mapping_of(RegionKey key) {
  std::unique_ptr<Mapping>& mapping = mappings_[number_of(key)];
  if (mapping == nullptr) {
    mapping = std::make_unique<Mapping>();
    mapping->key = key;
    unasked_.push_back(key);
    flush();
  }
  return *mapping;
}

Status Channel::on_region(const RegionReplyPacket& packet, Fd memfd) {
  const auto found = mappings_.find(number_of(packet.key));
  if (found == mappings_.end() || found->second->ready)
    return {Errc::malformed, "shm: the peer sent a region that was not asked for"};
  Mapping& mapping = *found->second;
  Status status = packet.why.status();
  if (status) status = map(mapping, packet, memfd);
  if (status == Errc::malformed) return status;
  while (Item* item = mapping.parked.pop()) {
    if (status)
      make_ready(item);
    else
      finish(*item, status.with_context(name_of(item->work)));
  }
  if (!status) mappings_.erase(found);
  return {};
}

Status Channel::map(Mapping& mapping, const RegionReplyPacket& packet, const Fd& memfd) {
  mapping.size = packet.size;
  mapping.access = packet.access;
  mapping.foreign = packet.foreign != 0;
  mapping.address = packet.address;
  if (!mapping.foreign) {
    struct stat facts {};
    const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
    // Without the seal the peer could cut the file, and this process would die of SIGBUS.
    if (!memfd || ::fstat(memfd.get(), &facts) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 || packet.size == 0 ||
        static_cast<std::uint64_t>(facts.st_size) < packet.size)
      return {Errc::malformed, fmt::format("shm: the peer's region of {} bytes came without a memfd that holds as much "
                                           "and can not shrink",
                                           packet.size)};
    const int protection = allows(packet.access, Access::write) ? PROT_READ | PROT_WRITE : PROT_READ;
    void* memory = ::mmap(nullptr, packet.size, protection, MAP_SHARED, memfd.get(), 0);
    if (memory == MAP_FAILED)
      return {Errc::resource_exhausted,
              fmt::format("mapping {} bytes: {} (vm.max_map_count or RLIMIT_AS)", packet.size, std::strerror(errno))};
    mapping.base = static_cast<std::byte*>(memory);
    ::madvise(memory, packet.size, MADV_HUGEPAGE);
  }
  mapping.ready = true;
  return {};
}

Status Channel::on_region_gone(const RegionGonePacket& packet) {
  // Unknown here when the region was taken back before our request for it was answered with it.
  const auto found = mappings_.find(number_of(packet.key));
  if (found == mappings_.end() || !found->second->ready) return {};
  found->second->gone = true;
  drop_if_unused(*found->second);
  return {};
}

void Channel::drop_if_unused(Mapping& mapping) {
  if (mapping.gone && mapping.users == 0) mappings_.erase(number_of(mapping.key));
}

// ---- items

void Channel::make_ready(Item* item) {
  item->state = Item::State::ready;
  item->mapping = nullptr;
  ready_.push(item);
  if (active) return;
  active = true;
  parts_.active.push_back(this);
}

void Channel::finish(Item& item, Status status) {
  parts_.finished.push_back({item.work.cookie, std::move(status)});
  --parts_.outstanding;
  item.state = Item::State::unused;
  unused_.push(&item);
  if (Mapping* mapping = std::exchange(item.mapping, nullptr); mapping != nullptr && item.checked) {
    --mapping->users;
    drop_if_unused(*mapping);
  }
}

std::uint64_t Channel::run(std::uint64_t budget) {
  Item& item = *ready_.front();
  if (!item.checked && !prepare(item)) return least_cost;
  if (item.sharing) return run_shared(item, budget);
  const std::uint64_t before = item.work.slices.bytes;
  const Status status = copy_portion(item, item.work.slices, budget);
  const std::uint64_t bytes = before - item.work.slices.bytes;
  if (status && item.work.slices.bytes > 0) return bytes;
  ready_.pop();
  if (status) {
    copied(item);
  } else {
    finish(item, status);
    if (status == Errc::channel_error) fail(status);
  }
  return std::max(bytes, least_cost);
}

std::uint64_t Channel::run_shared(Item& item, std::uint64_t budget) {
  std::uint64_t bytes = 0;
  while (bytes < budget) {
    const std::uint64_t share = item.shared->copy_share();
    if (share == 0) break;
    bytes += share;
  }
  if (!item.shared->given_out()) return bytes;
  ready_.pop();
  await_waiters(item, {});
  return std::max(bytes, least_cost);
}

/// From here on the item ends as soon as no waiter copies for it any more.
void Channel::await_waiters(Item& item, Status why) {
  if (!why) item.shared->stop(std::move(why));
  item.state = Item::State::helper;
  ++in_helpers_;
  parts_.shared.push(&item);
}

bool Channel::end_sharing(Item& item) {
  if (!item.shared->none_inside()) return false;
  item.work.waiters->withdraw(item.shared.get());
  item.result = item.shared->close();
  return true;
}

/// Decides what becomes of the foremost item. True: its first portion can be copied here and now;
/// otherwise it has gone elsewhere.
bool Channel::prepare(Item& item) {
  const WorkItem& work = item.work;
  if (Status status = check_operation(item); !status) {
    ready_.pop();
    finish(item, std::move(status));
    return false;
  }
  if (work.op == Op::send || (work.op == Op::write_imm && work.slices.bytes == 0)) {
    ready_.pop();
    copied(item);
    return false;
  }
  item.mapping = &mapping_of(work.remote->key);
  if (!item.mapping->ready) {
    ready_.pop();
    item.state = Item::State::parked;
    item.mapping->parked.push(&item);
    return false;
  }
  if (Status status = check_reach(item); !status) {
    ready_.pop();
    finish(item, std::move(status));
    return false;
  }
  item.checked = true;
  ++item.mapping->users;
  if (parts_.pool == nullptr || total_of(work) < helper_transfer_bytes || work.slices.bytes < helper_item_bytes) {
    if (may_share(work)) share(item);
    return true;
  }
  ready_.pop();
  item.state = Item::State::helper;
  ++in_helpers_;
  parts_.pool->submit(&item);
  return false;
}

bool Channel::may_share(const WorkItem& work) const {
  return parts_.config.waiters_copy && work.waiters != nullptr && work.slices.bytes >= least_shared_bytes;
}

void Channel::share(Item& item) {
  if (!item.shared) item.shared = RefPtr<SharedCopy>(new SharedCopy, true);
  item.shared->open(item);
  item.sharing = true;
  item.work.waiters->make(RefPtr<SharedWork>(item.shared.get()));
}

/// What can be said without knowing how the region is reached.
Status Channel::check_operation(const Item& item) const {
  const WorkItem& work = item.work;
  if (work.op == Op::send) {
    if (work.message.size() <= max_message_bytes) return {};
    return {Errc::too_large,
            fmt::format("shm: a message of {} bytes: at most {} are possible", work.message.size(), max_message_bytes)};
  }
  if (work.op == Op::write_imm && work.slices.bytes == 0) return {};
  if (work.op == Op::recv || work.local == nullptr || work.remote == nullptr)
    return {Errc::invalid_argument, fmt::format("shm: {} without its regions", to_string(work.op))};
  if (work.local->kind != MemoryKind::host || work.remote->kind != MemoryKind::host)
    return {Errc::no_path, name_of(work) + ": shared memory joins host memory only, and one side is on a GPU"};
  if (!allows(work.remote->access, needed_by(work.op)))
    return {Errc::access_denied, name_of(work) + ": its owner does not allow that to peers"};
  if (work.remote->key.slot >= RegionTable::max_regions)
    return {Errc::unknown_region, name_of(work) + ": no engine has a region of that number"};
  return {};
}

/// What can be said once it is known. Every slice is looked at before the first byte moves.
Status Channel::check_reach(const Item& item) const {
  const WorkItem& work = item.work;
  if (item.mapping->foreign && !peer_.usable()) return peer_.usable().with_context(name_of(work));
  if (!allows(item.mapping->access, needed_by(work.op)))
    return {Errc::access_denied, name_of(work) + ": its owner does not allow that to peers"};
  const std::uint64_t remote_size = std::min(item.mapping->size, work.remote->size);
  bool inside = true;
  std::uint64_t bytes = 0;
  work.slices.for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
    inside = inside && fits(local, length, work.local->size) && fits(remote, length, remote_size);
    bytes += length;
  });
  if (inside && bytes == work.slices.bytes) return {};
  if (inside)
    return {Errc::invalid_argument, fmt::format("{}: its {} slices hold {} bytes, not {}", name_of(work),
                                                work.slices.count, bytes, work.slices.bytes)};
  std::string text;
  work.slices.for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
    if (!text.empty()) return;
    if (!fits(remote, length, remote_size))
      text = fmt::format("{}: the slice of {} bytes at remote offset {} leaves its {} bytes", name_of(work), length,
                         remote, remote_size);
    else if (!fits(local, length, work.local->size))
      text = fmt::format("{}: the slice of {} bytes at local offset {} leaves the local region '{}' of {} bytes",
                         name_of(work), length, local, work.local->name, work.local->size);
  });
  return {Errc::out_of_bounds, std::move(text)};
}

/// All bytes of the item are where they belong (or it has none).
void Channel::copied(Item& item) {
  if (item.work.op == Op::read || item.work.op == Op::write) {
    finish(item, {});
    return;
  }
  item.number = next_number_++;
  item.state = Item::State::sending;
  sending_.push(&item);
  flush();
}

void Channel::on_helper_done(Item* item) {
  --in_helpers_;
  const Status result = std::move(item->result);
  if (state_ != State::ending) {
    if (result)
      copied(*item);
    else
      finish(*item, result);
    if (result == Errc::channel_error) fail(result);
    return;
  }
  const bool one_sided = item->work.op == Op::read || item->work.op == Op::write;
  if (result == Errc::channel_error || (result && !one_sided))
    finish(*item, {Errc::channel_error, std::string(why_.text())});
  else
    finish(*item, result);
  if (in_helpers_ == 0) close_up();
}

Status Channel::copy_whole(Item& item) const {
  while (item.work.slices.bytes > 0) {
    if (stop_.load()) return {Errc::channel_error, "shm: the channel has ended"};
    if (item.cancelled.load()) return {Errc::cancelled, "shm: cancelled before it was copied to the end"};
    if (Status status = copy_portion(item, item.work.slices, parts_.config.chunk_bytes); !status) return status;
  }
  return {};
}

Status Channel::copy_share(const Item& item, SliceRange share) const {
  while (share.bytes > 0)
    if (Status status = copy_portion(item, share, share.bytes); !status) return status;
  return {};
}

Status Channel::copy_portion(const Item& item, SliceRange& left, std::uint64_t budget) const {
  const BusyMark mark(page_, item.mapping->key);
  switch (mark.answer()) {
    case BusyMark::Answer::closed:
      return {Errc::channel_error, "shm: the peer closed the channel"};
    case BusyMark::Answer::revoked:
      return {Errc::unknown_region, name_of(item.work) + ": its owner has unregistered it"};
    case BusyMark::Answer::granted:
      break;
  }
  if (item.mapping->foreign) return copy_foreign(item, left, budget);
  copy_mapped(item, left, budget);
  return {};
}

void Channel::copy_mapped(const Item& item, SliceRange& left, std::uint64_t budget) const {
  const WorkItem& work = item.work;
  const CopyKind kind = item.streaming ? CopyKind::streaming : CopyKind::cached;
  while (budget > 0 && left.bytes > 0) {
    std::array<CopyPiece, pieces_at_once> pieces;
    std::size_t count = 0;
    const SliceRange front = take_front(left, pieces.size(), budget);
    front.for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
      std::byte* here = work.local->data + local;
      std::byte* there = item.mapping->base + remote;
      pieces[count++] = work.op == Op::read ? CopyPiece{here, there, length} : CopyPiece{there, here, length};
    });
    shm_copy({pieces.data(), count}, kind);
    budget -= front.bytes;
  }
}

Status Channel::copy_foreign(const Item& item, SliceRange& left, std::uint64_t budget) const {
  const WorkItem& work = item.work;
  std::array<iovec, max_call_pieces> here;
  std::array<iovec, max_call_pieces> there;
  std::size_t count = 0;
  take_front(left, here.size(), budget).for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
    here[count] = {work.local->data + local, length};
    // An address of the peer's, never followed here. NOLINTNEXTLINE(performance-no-int-to-ptr)
    there[count++] = {reinterpret_cast<void*>(item.mapping->address + remote), length};
  });
  return peer_.copy(work.op == Op::read, {here.data(), count}, {there.data(), count});
}

}  // namespace kvferry::shm
