// One posted item on its way through a channel.
#pragma once

#include <atomic>
#include <cstdint>

#include <kvferry/transports/shm/shared_copy.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry::shm {

class Channel;
struct Mapping;

struct Item {
  enum class State : std::uint8_t {
    unused,
    ready,    ///< waits for its next portion
    parked,   ///< waits for the target to give the region
    helper,   ///< a helper thread or waiters copy it
    sending,  ///< its packet waits for room in the socket
    sent      ///< waits for the target's ack
  };

  WorkItem work;  ///< `slices` is what is still to be copied
  Channel* channel = nullptr;
  Mapping* mapping = nullptr;
  Item* next = nullptr;  ///< in whichever queue holds the item
  std::uint64_t number = 0;
  State state = State::unused;
  bool checked = false;
  bool streaming = false;
  bool sharing = false;         ///< its bytes are given out by `shared`, no longer by `work`
  RefPtr<SharedCopy> shared{};  ///< kept for the next item that uses this place
  std::atomic<bool> cancelled{false};
  Status result;  ///< a helper's outcome
};

/// First in, first out; an item is in at most one queue.
class ItemQueue {
 public:
  bool empty() const noexcept { return head_ == nullptr; }
  Item* front() const noexcept { return head_; }

  void push(Item* item) noexcept {
    item->next = nullptr;
    (tail_ != nullptr ? tail_->next : head_) = item;
    tail_ = item;
  }

  Item* pop() noexcept {
    Item* item = head_;
    if (item == nullptr) return nullptr;
    head_ = item->next;
    if (head_ == nullptr) tail_ = nullptr;
    return item;
  }

  /// Takes the item out wherever it stands.
  void remove(Item* item) noexcept {
    Item* before = nullptr;
    for (Item* at = head_; at != item; at = at->next) before = at;
    (before != nullptr ? before->next : head_) = item->next;
    if (tail_ == item) tail_ = before;
  }

 private:
  Item* head_ = nullptr;
  Item* tail_ = nullptr;
};

}  // namespace kvferry::shm
