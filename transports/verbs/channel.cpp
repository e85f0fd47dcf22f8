#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/verbs/channel.hpp>

namespace kvferry::verbs {
namespace {

/// Skips what is empty, so that `first` and `skip` name the next byte.
void trim(SliceRange& range) {
  while (range.bytes > 0 && range.skip == range.first->length) {
    ++range.first;
    --range.count;
    range.skip = 0;
  }
}

void take_off(SliceRange& range, std::uint64_t bytes) {
  range.skip += bytes;
  range.bytes -= bytes;
  trim(range);
}

// A target that is gone says nothing by itself: only a device that does not answer shows it.
constexpr auto probe_interval = std::chrono::milliseconds(250);

bool is_shortage(int error) { return error == ENOMEM || error == EAGAIN || error == ENOSPC || error == ENOBUFS; }

}  // namespace

Channel::Channel(ChannelId id, const ChannelSpec& spec, PortParts& parts)
    : id_(id), spec_(spec), parts_(parts), wire_id_(random_number()), items_(most_channel_items) {
  for (Item& item : items_) free_.push_back(&item);
}

Channel::~Channel() { break_pairs(); }

// ---------------------------------------------------------------- connecting

Status Channel::ask() {
  auto target = decode_port_address(spec_.address);
  if (!target) return target.status();
  if (Status status = choose(*target); !status) return status;
  if (Status status = make_pairs(); !status) return status;
  if (parts_.cm) return ask_cm(*target);
  request_.token = spec_.token;
  request_.target_incarnation = spec_.target_incarnation;
  request_.channel = wire_id_;
  for (const DataQueue& queue : data_) request_.pairs.push_back(queue.sends->pair().address());
  request_.pairs.push_back(messages_->pair().address());
  parts_.exchanges.emplace_back(id_, encode(request_));
  asked_ = true;
  return {};
}

// Rail n of a peer joins the nth devices of both hosts, as far as these can talk.
Status Channel::choose(const PortAddress& target) {
  std::string reasons;
  for (std::size_t i = 0; i < parts_.sides.size(); ++i) {
    DeviceSide& side = *parts_.sides[(spec_.path + i) % parts_.sides.size()];
    const PortFacts& ours = side.device.facts;
    for (std::size_t j = 0; j < target.devices.size(); ++j) {
      const auto index = static_cast<std::uint32_t>((spec_.path + j) % target.devices.size());
      const DeviceAddress& theirs = target.devices[index];
      const auto no = [&](std::string_view why) {
        reasons += fmt::format("{}{} to {}: {}", reasons.empty() ? "" : "; ", ours.name(), theirs.name, why);
      };
      if (ours.ethernet != theirs.ethernet) {
        no("one is InfiniBand, the other Ethernet");
        continue;
      }
      const auto gids = match_gids(ours.gids, theirs.gids);
      if (ours.ethernet && !gids) {
        no("no two GIDs of one kind");
        continue;
      }
      side_ = &side;
      peer_device_ = theirs.name;
      peer_index_ = index;
      // InfiniBand needs the global header only across subnets, which the GIDs' first half names.
      route_.global = ours.ethernet || (gids && !std::equal(gids->first.raw.begin(), gids->first.raw.begin() + 8,
                                                            gids->second.raw.begin()));
      route_.lid = theirs.lid;
      route_.mtu = std::min(side.device.mtu, theirs.mtu);
      if (gids) {
        route_.gid = gids->second.raw;
        route_.gid_index = gids->first.index;
        request_.gid = gids->first.raw;
        request_.gid_index = gids->second.index;
        log(LogLevel::debug,
            fmt::format("verbs: {} ({}, GID {} at index {}) to {} ({})", ours.name(), to_string(gids->first.type),
                        to_string(gids->first.raw), gids->first.index, theirs.name, to_string(gids->second.raw)));
      }
      request_.device = index;
      request_.lid = ours.lid;
      request_.mtu = route_.mtu;
      request_.global = route_.global;
      return {};
    }
  }
  return {Errc::no_path, fmt::format("verbs: no two RDMA devices can talk ({})", reasons)};
}

Status Channel::make_pairs() {
  const Device& device = side_->device;
  request_.read_depth = static_cast<std::uint32_t>(std::clamp(device.context->limits().max_qp_init_rd_atom, 1, 16));
  const int pairs = parts_.config.queue_pairs;
  const auto depth = static_cast<std::uint32_t>(parts_.config.queue_depth);
  const std::uint32_t entries = depth * static_cast<std::uint32_t>(pairs + 1);
  if (!side_->completions->reserve(entries))
    return {Errc::resource_exhausted,
            fmt::format("verbs: the completion queue of {} has no room for {} more requests (of {}): lower "
                        "verbs.queue_pairs or verbs.queue_depth, or use more pollers",
                        device.facts.name(), entries, side_->completions->entries())};
  reserved_ = entries;
  for (int i = 0; i <= pairs; ++i) {
    const bool for_messages = i == pairs;
    PairSpec spec;
    spec.queue = side_->completions->get();
    spec.receives = (for_messages ? side_->large_receives : side_->small_receives)->get();
    spec.depth = depth;
    auto pair = QueuePair::create(device, spec);
    if (!pair) return pair.status();
    auto sends = std::make_unique<SendQueue>(std::move(*pair), device.context->api(), parts_.new_slot());
    parts_.watch(*sends, *this);
    after_.resize(std::max<std::size_t>(after_.size(), sends->pair().depth()));
    if (for_messages)
      messages_ = std::move(sends);
    else
      data_.push_back({std::move(sends), {}, 0});
  }
  return {};
}

void Channel::on_answer(const Result<std::string>& answer) {
  if (state_ == State::ending) {
    // Answers come in the order of the requests, so an answer to the first may still be under way.
    if (!answer || !decode_connect_answer(*answer)) close_answered_ = true;
    return;
  }
  if (state_ != State::asking) return;
  if (!answer) return begin_end(answer.status());
  const auto decoded = decode_connect_answer(*answer);
  if (!decoded) return begin_end(decoded.status());
  if (Status status = connect(*decoded); !status) return begin_end(status);
  notification_credits_ = decoded->notifications;
  message_credits_ = decoded->messages;
  begin_proof();
}

void Channel::begin_proof() {
  if (Status status = prove(); !status) return begin_end(status);
  state_ = State::proving;
}

// Queue pairs connect without a packet: whether the two devices reach each other shows only in use. A rail
// that is up and carries nothing would keep transfers from the transports that could.
Status Channel::prove() {
  bool posted = post_empty(*messages_);
  for (DataQueue& queue : data_) posted = post_empty(*queue.sends) && posted;
  if (posted) return {};
  return {Errc::channel_error, fmt::format("verbs: {} takes no requests", side_->device.facts.name())};
}

/// Touches nothing, and is acknowledged by the peer's device or not at all.
bool Channel::post_empty(SendQueue& sends) {
  sends.add({}).opcode = IBV_WR_RDMA_WRITE;
  return sends.post().accepted == 1;
}

Status Channel::connect(const ConnectAnswer& answer) {
  if (answer.pairs.size() != request_.pairs.size())
    return {Errc::malformed, fmt::format("verbs: the target connected {} of {} queue pairs", answer.pairs.size(),
                                         request_.pairs.size())};
  route_.mtu = std::min(route_.mtu, answer.mtu);
  route_.reads_out = std::clamp(answer.read_depth, 1u, request_.read_depth);
  route_.reads_served = 0;
  for (std::size_t i = 0; i < answer.pairs.size(); ++i) {
    route_.peer = answer.pairs[i];
    if (Status status = pair_at(i).pair().connect(route_, parts_.config); !status) return status;
  }
  return {};
}

// ---------------------------------------------------------------- taking items

std::size_t Channel::post(std::span<const WorkItem> items) {
  if (state_ != State::up) return 0;
  std::size_t taken = 0;
  for (; taken < items.size() && !free_.empty(); ++taken) {
    Item& item = *free_.back();
    free_.pop_back();
    item = Item{};
    item.in_use = true;
    item.work = items[taken];
    trim(item.work.slices);
    item.bytes = item.work.slices.bytes;
    if (item.work.op == Op::send) {
      item.data_posted = true;
      texts_.push_back(&item);
      continue;
    }
    if (Status status = prepare(item); !status) {
      finish(item, status);
      continue;
    }
    DataQueue& queue = least_loaded();
    item.queue = queue.sends.get();
    queue.bytes += item.bytes;
    queue.items.push_back(&item);
  }
  pump();
  return taken;
}

Status Channel::prepare(Item& item) {
  if (item.bytes == 0) return {};
  const Registration* registration = parts_.registrations.find(item.work.local->key);
  if (registration == nullptr)
    return {Errc::cancelled, fmt::format("verbs: the local region '{}' was unregistered", item.work.local->name)};
  item.local = &registration->local[side_->index];
  auto& known = remote_keys_[number_of(item.work.remote->key)];
  if (known.empty()) {
    const auto& all = item.work.remote->descriptors;
    const auto ours = std::find_if(all.begin(), all.end(), [](const auto& one) { return one.first == "verbs"; });
    if (ours == all.end())
      return {Errc::no_path,
              fmt::format("verbs: the peer has not registered its region '{}' for RDMA", item.work.remote->name)};
    auto decoded = decode_keys(ours->second);
    if (!decoded) return decoded.status();
    known = std::move(*decoded);
  }
  if (peer_index_ >= known.size())
    return {Errc::malformed, fmt::format("verbs: the peer's region '{}' has keys for {} devices, not for number {}",
                                         item.work.remote->name, known.size(), peer_index_)};
  item.remote = &known[peer_index_];
  return {};
}

Channel::DataQueue& Channel::least_loaded() {
  return *std::min_element(data_.begin(), data_.end(),
                           [](const DataQueue& a, const DataQueue& b) { return a.bytes < b.bytes; });
}

// ---------------------------------------------------------------- posting

void Channel::pump() {
  if (state_ != State::up) return;
  blocked_ = false;
  for (DataQueue& queue : data_) pump_data(queue);
  announce();
}

void Channel::pump_data(DataQueue& queue) {
  while (state_ == State::up && !queue.items.empty()) {
    for (Item* item : queue.items) {
      if (queue.sends->room() == 0) break;
      chain_item(queue, *item);
    }
    const std::uint32_t wanted = queue.sends->chained();
    const ChainOutcome outcome = queue.sends->post();
    if (outcome.accepted > 0) {
      for (std::uint32_t i = 0; i < outcome.accepted; ++i) {
        Item& item = *queue.sends->posted_before(outcome.accepted - i).item;
        item.work.slices = after_[i];
        ++item.outstanding;
      }
    }
    leave_posted(queue);
    if (outcome.error != 0) {
      if (is_shortage(outcome.error)) {
        blocked_ = true;
        return;
      }
      on_refused(queue, outcome.error);
      continue;
    }
    if (wanted == 0) return;
  }
}

void Channel::chain_item(DataQueue& queue, Item& item) {
  SliceRange left = item.work.slices;
  while (left.bytes > 0 && queue.sends->room() > 0) {
    add_request(*queue.sends, item, left);
    after_[queue.sends->chained() - 1] = left;
  }
  if (left.bytes == 0 && item.work.slices.bytes > 0) queue.sends->signal_last();
}

/// One request: the next stretch that is contiguous at the target, gathered from as many local pieces as
/// the device takes. It is taken off what is left.
void Channel::add_request(SendQueue& sends, Item& item, SliceRange& left) {
  const std::uint64_t remote_offset = left.first->remote_offset + left.skip;
  const std::uint64_t most = std::min(side_->device.max_message_bytes, item.remote->room_at(remote_offset));
  ibv_send_wr& request = sends.add({&item});
  request.opcode = item.work.op == Op::read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
  request.wr.rdma.remote_addr = item.remote->address + remote_offset;
  request.wr.rdma.rkey = item.remote->key_at(remote_offset);
  std::uint64_t total = 0;
  while (left.bytes > 0 && total < most && request.num_sge < static_cast<int>(sends.pair().max_pieces())) {
    if (left.first->remote_offset + left.skip != remote_offset + total) break;
    const std::uint64_t local_offset = left.first->local_offset + left.skip;
    const std::uint64_t bytes = std::min({left.first->length - left.skip, left.bytes, most - total,
                                          item.local->room_at(local_offset), std::uint64_t{1} << 30});
    ibv_sge& piece = request.sg_list[request.num_sge++];
    piece.addr = item.local->address + local_offset;
    piece.length = static_cast<std::uint32_t>(bytes);
    piece.lkey = item.local->key_at(local_offset);
    total += bytes;
    take_off(left, bytes);
  }
}

/// Items at the head of the queue that are posted as a whole go on to what comes after.
void Channel::leave_posted(DataQueue& queue) {
  while (!queue.items.empty() && queue.items.front()->work.slices.bytes == 0) {
    Item& item = *queue.items.front();
    queue.items.erase(queue.items.begin());
    item.data_posted = true;
    if (item.work.op == Op::write_imm) notifications_.push_back(&item);
    settle(item);
  }
}

/// The device will never take the item's next request: that item alone fails.
void Channel::on_refused(DataQueue& queue, int error) {
  Item& item = *queue.items.front();
  const Status why(Errc::internal, fmt::format("verbs: {} refuses a request of {}: {}", side_->device.facts.name(),
                                               item.work.op == Op::read ? "read" : "write", std::strerror(error)));
  if (error != EINVAL) return begin_end({Errc::channel_error, std::string(why.text())});
  queue.items.erase(queue.items.begin());
  item.result = why;
  drain_prefix(item);
}

/// What the device has taken of an item that goes no further must end with a completion of its own: an
/// empty write behind it, which touches nothing.
void Channel::drain_prefix(Item& item) {
  if (item.outstanding > 0) {
    SendQueue& sends = *item.queue;
    if (sends.room() > 0) {
      ibv_send_wr& request = sends.add({&item});
      request.opcode = IBV_WR_RDMA_WRITE;
      sends.signal_last();
      const ChainOutcome outcome = sends.post();
      if (outcome.accepted == 1) {
        ++item.outstanding;
        return;
      }
    }
    // Without a place for it the queue is full of requests of which some are signalled.
    if (sends.in_flight() < sends.pair().depth())
      return begin_end({Errc::channel_error, std::string(item.result.text())});
  }
  settle(item);
}

// ---------------------------------------------------------------- notifications and messages

void Channel::announce() {
  while (state_ == State::up && !notifications_.empty() && notification_credits_ > 0) {
    if (!announce(*notifications_.front())) break;
    notifications_.pop_front();
    --notification_credits_;
  }
  while (state_ == State::up && !texts_.empty() && message_credits_ > 0) {
    if (!announce(*texts_.front())) break;
    texts_.pop_front();
    --message_credits_;
  }
}

bool Channel::announce(Item& item) {
  const bool text = item.work.op == Op::send;
  SendQueue& sends = text ? *messages_ : *item.queue;
  BufferPool& buffers = text ? *side_->large_sends : *side_->small_sends;
  if (sends.room() == 0) return false;
  if (buffers.empty()) {
    blocked_ = true;
    return false;
  }
  Head head;
  head.kind = text ? HeadKind::message : HeadKind::notification;
  head.immediate = item.work.immediate;
  head.sequence = item.work.sequence;
  head.channel = wire_id_;
  head.number = next_number_;
  head.bytes = static_cast<std::uint32_t>(item.work.message.size());
  const std::uint32_t buffer = buffers.take();
  encode_head(head, buffers.data(buffer));
  if (head.bytes > 0) std::memcpy(buffers.data(buffer) + head_bytes, item.work.message.data(), head.bytes);

  Posted posted;
  posted.item = &item;
  (text ? posted.large_buffer : posted.small_buffer) = buffer;
  ibv_send_wr& request = sends.add(posted);
  request.opcode = IBV_WR_SEND;
  request.sg_list[0] = buffers.piece(buffer, static_cast<std::uint32_t>(head_bytes) + head.bytes);
  request.num_sge = 1;
  if (request.sg_list[0].length <= sends.pair().max_inline()) request.send_flags |= IBV_SEND_INLINE;
  sends.signal_last();
  const ChainOutcome outcome = sends.post();
  if (outcome.accepted == 0) {
    buffers.give_back(buffer);
    blocked_ = true;
    if (!is_shortage(outcome.error))
      begin_end({Errc::channel_error, fmt::format("verbs: {} refuses a message: {}", side_->device.facts.name(),
                                                  std::strerror(outcome.error))});
    return false;
  }
  item.queue = &sends;
  item.number = next_number_++;
  item.announced = true;
  ++item.outstanding;
  unaccepted_.emplace(item.number, &item);
  return true;
}

void Channel::probe() {
  if (!awaits_acceptance() || messages_->in_flight() > 0) return;
  const TimePoint now = parts_.now();
  if (now < probe_at_) return;
  if (probe_at_ != TimePoint{}) post_empty(*messages_);
  probe_at_ = now + probe_interval;
}

void Channel::on_accepted(std::uint32_t number) {
  const auto found = unaccepted_.find(number);
  if (found == unaccepted_.end()) return;
  Item& item = *found->second;
  unaccepted_.erase(found);
  probe_at_ = {};
  ++(item.work.op == Op::send ? message_credits_ : notification_credits_);
  item.accepted = true;
  settle(item);
}

// ---------------------------------------------------------------- completions

void Channel::on_sent(SendQueue& queue, const ibv_wc& completion) {
  const bool ok = completion.status == IBV_WC_SUCCESS;
  Status why;
  if (!ok) why = describe(completion);
  queue.retire(static_cast<std::uint32_t>(completion.wr_id), [&](const Posted& posted, bool last) {
    side_->give_back(posted);
    if (posted.item == nullptr) return;
    --posted.item->outstanding;
    // Requests before the one that failed have succeeded: a queue pair works in order.
    if (last && !ok && posted.item->result.is_ok()) posted.item->result = why;
    settle(*posted.item);
  });
  if (!ok && (state_ == State::up || state_ == State::proving))
    return begin_end({Errc::channel_error, std::string(why.text())});
  if (state_ == State::proving && quiet()) {
    state_ = State::up;
    parts_.events.on_channel_up(id_);
  }
}

Status Channel::describe(const ibv_wc& completion) const {
  const std::string where =
      fmt::format("verbs: {} to {} (queue pair {})", side_->device.facts.name(), peer_device_, completion.qp_num);
  switch (completion.status) {
    case IBV_WC_WR_FLUSH_ERR:
      return {Errc::channel_error, std::string(why_.is_ok() ? where + ": flushed" : std::string(why_.text()))};
    case IBV_WC_RETRY_EXC_ERR:
      return {Errc::channel_error, where + ": the peer's device does not answer"};
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return {Errc::channel_error, where + ": the peer has had no buffer for a message for too long"};
    case IBV_WC_REM_ACCESS_ERR:
      return {Errc::unknown_region,
              where +
                  ": the peer's device refuses the access: the region has been unregistered there, or does not "
                  "allow it"};
    case IBV_WC_LOC_PROT_ERR:
      return {Errc::cancelled, where + ": the local region has been unregistered"};
    default:
      return {Errc::channel_error, fmt::format("{}: completion status {} (vendor code {})", where,
                                               static_cast<int>(completion.status), completion.vendor_err)};
  }
}

// ---------------------------------------------------------------- ends

/// Ends the item if nothing of it is under way any more and nothing is left to do.
void Channel::settle(Item& item) {
  if (item.outstanding > 0 || state_ == State::ending) return;
  if (!item.result.is_ok()) {
    withdraw(item);
    return finish(item, item.result);
  }
  if (!item.data_posted || (item.announces() && !item.accepted)) return;
  finish(item, {});
}

/// Takes the item out of every queue that waits.
void Channel::withdraw(Item& item) {
  for (DataQueue& queue : data_) std::erase(queue.items, &item);
  std::erase(notifications_, &item);
  std::erase(texts_, &item);
  if (item.announced) unaccepted_.erase(item.number);
}

void Channel::finish(Item& item, Status status) {
  for (DataQueue& queue : data_)
    if (queue.sends.get() == item.queue) queue.bytes -= item.bytes;
  parts_.finished.push_back({item.work.cookie, std::move(status)});
  item = Item{};
  free_.push_back(&item);
}

void Channel::cancel(std::uint64_t cookie) {
  const auto found = std::find_if(items_.begin(), items_.end(),
                                  [cookie](const Item& item) { return item.in_use && item.work.cookie == cookie; });
  // What the device or the target's engine has can not be taken back.
  if (found == items_.end() || state_ != State::up || found->announced) return;
  if (found->data_posted && found->work.op != Op::send && !found->announces()) return;
  found->result = {Errc::cancelled, "verbs: cancelled"};
  withdraw(*found);
  found->data_posted = true;
  if (found->outstanding == 0) return settle(*found);
  drain_prefix(*found);
}

void Channel::begin_end(const Status& why) {
  if (state_ == State::ending || state_ == State::ended) return;
  state_ = State::ending;
  why_ = why;
  fence_by_ = parts_.now() + parts_.context.fence_limit;
  cm_ids_.clear();
  for (DataQueue& queue : data_) queue.sends->pair().fail();
  if (messages_) messages_->pair().fail();
  if (asked_)
    parts_.exchanges.emplace_back(id_, encode(CloseRequest{wire_id_}));
  else
    close_answered_ = true;
}

bool Channel::quiet() const noexcept {
  return std::all_of(data_.begin(), data_.end(),
                     [](const DataQueue& queue) { return queue.sends->in_flight() == 0; }) &&
         (!messages_ || messages_->in_flight() == 0);
}

void Channel::tick(TimePoint now) {
  if (state_ == State::asking && now >= spec_.give_up)
    begin_end({Errc::unreachable, fmt::format("verbs: the peer did not answer the request to connect {} in time",
                                              side_->device.facts.name())});
  if (state_ == State::proving && now >= spec_.give_up)
    begin_end(
        {Errc::unreachable, fmt::format("verbs: no packet of {} came through to {} in time: do the two ports share "
                                        "a network, and does UDP port 4791 pass?",
                                        side_->device.facts.name(), peer_device_)});
  if (state_ == State::ending) end_if_quiet(now);
}

TimePoint Channel::next_wakeup() const noexcept {
  if (state_ == State::asking || state_ == State::proving) return spec_.give_up;
  if (awaits_acceptance()) return probe_at_;
  return state_ == State::ending ? fence_by_ : TimePoint::max();
}

void Channel::end_if_quiet(TimePoint now) {
  const bool patient = now < fence_by_;
  if ((!quiet() || !close_answered_) && patient) return;
  break_pairs();
  end_items();
  state_ = State::ended;
}

/// After this no device touches anything for this channel, whatever it has or has not said.
void Channel::break_pairs() {
  const auto drop = [this](std::unique_ptr<SendQueue>& sends) {
    if (!sends) return;
    if (sends->in_flight() > 0)
      sends->retire(sends->newest(), [this](const Posted& posted, bool) {
        side_->give_back(posted);
        if (posted.item != nullptr) --posted.item->outstanding;
      });
    parts_.forget(*sends);
    sends.reset();
  };
  for (DataQueue& queue : data_) drop(queue.sends);
  drop(messages_);
  data_.clear();
  if (side_ != nullptr && reserved_ > 0) side_->completions->release(std::exchange(reserved_, 0));
}

void Channel::end_items() {
  notifications_.clear();
  texts_.clear();
  unaccepted_.clear();
  for (Item& item : items_) {
    if (!item.in_use) continue;
    const bool done = item.result.is_ok() && item.data_posted && (!item.announces() || item.accepted);
    Status status = item.result;
    if (item.result.is_ok() && !done) status = {Errc::channel_error, std::string(why_.text())};
    finish(item, std::move(status));
  }
}

}  // namespace kvferry::verbs
