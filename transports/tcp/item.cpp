#include "item.hpp"

#include <algorithm>

namespace kvferry::tcp {
namespace {

// An id is the item's place and, above, how often the place was used: a response that comes late finds
// nobody. The last place stays unused, so that no id is goodbye_id.
constexpr std::size_t most_items = 0xffff;
constexpr std::uint32_t place_mask = 0xffff;
constexpr std::uint32_t use_step = 0x10000;

// Items beyond so many give their buffers back: a burst must not keep its memory for ever.
constexpr std::size_t most_kept = 512;

}  // namespace

void Item::prepare(const WorkItem& work) {
  cookie = work.cookie;
  op = work.op;
  sent = false;
  abandoned = false;
  wire.resize(std::max(wire.size(), request_bytes + work.slices.count * descriptor_bytes));
  parts.clear();
  parts.emplace_back();
  Request request;
  request.op = op;
  request.id = id;
  request.immediate = work.immediate;
  request.sequence = work.sequence;
  if (op == Op::send) {
    bytes = work.message.size();
    // sendmsg does not write to it.
    if (bytes > 0) parts.push_back({const_cast<std::byte*>(work.message.data()), work.message.size()});
  } else {
    bytes = work.slices.bytes;
    request.descriptors = add_slices(work);
    if (request.descriptors > 0 || op != Op::write_imm) request.region = work.remote->key;
  }
  request.payload_bytes = bytes;
  encode(request, wire.data());
  parts[0] = {wire.data(), request_bytes + request.descriptors * descriptor_bytes};
  at = parts.data();
  end = op == Op::read ? at + 1 : at + parts.size();
}

std::uint32_t Item::add_slices(const WorkItem& work) {
  std::uint32_t count = 0;
  std::byte* next = wire.data() + request_bytes;
  Descriptor open;
  work.slices.for_each([&](std::uint64_t local_offset, std::uint64_t remote_offset, std::uint64_t length) {
    if (count > 0 && open.offset + open.length == remote_offset) {
      open.length += length;
    } else {
      open = {remote_offset, length};
      next = wire.data() + request_bytes + count * descriptor_bytes;
      ++count;
    }
    encode(open, next);
    std::byte* local = work.local->data + local_offset;
    iovec& last = parts.back();
    if (parts.size() > 1 && static_cast<std::byte*>(last.iov_base) + last.iov_len == local) {
      last.iov_len += length;
    } else {
      parts.push_back({local, length});
    }
  });
  return count;
}

Item* ItemPool::take() {
  if (free_.empty()) {
    if (items_.size() == most_items) return nullptr;
    items_.push_back(std::make_unique<Item>());
    items_.back()->id = static_cast<std::uint32_t>(items_.size() - 1);
    free_.push_back(static_cast<std::uint16_t>(items_.size() - 1));
  }
  Item* item = items_[free_.back()].get();
  free_.pop_back();
  return item;
}

void ItemPool::give(Item& item) {
  if ((item.id & place_mask) >= most_kept) {
    item.parts = {};
    item.wire = {};
  }
  free_.push_back(static_cast<std::uint16_t>(item.id & place_mask));
  item.id += use_step;
  item.socket = nullptr;
}

Item* ItemPool::find(std::uint32_t id) const noexcept {
  const std::uint32_t place = id & place_mask;
  if (place >= items_.size()) return nullptr;
  Item* item = items_[place].get();
  return item->id == id && item->socket != nullptr ? item : nullptr;
}

}  // namespace kvferry::tcp
