// The few words of memory that both sides of a channel share. With them the target takes a region
// back, or ends the channel, without the initiator's co-operation in between its copies:
//
//   initiator                              target
//   busy += 1                              valid = 0 (or target_closed = 1)
//   valid as expected, and not closed?     busy == 0?
//     copy one bounded portion               yes: nothing touches the region, and nothing will
//   busy -= 1                                no: look again later
//
// All accesses are sequentially consistent, so at least one side sees the other. Whatever a broken
// peer writes here can delay a release until it is forced; it can not make the target touch anything.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include <kvferry/runtime/region_table.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/shm/fd.hpp>

namespace kvferry::shm {

struct RegionWord {
  std::atomic<std::uint64_t> valid{0};  ///< valid_word() of the region that may be copied; 0: none
  std::atomic<std::uint32_t> busy{0};   ///< threads of the initiator that copy right now
  std::uint32_t unused = 0;
};

struct ControlWords {
  std::atomic<std::uint32_t> target_closed{0};
  std::atomic<std::uint32_t> initiator_closed{0};
  std::array<std::uint32_t, 14> unused{};
  std::array<RegionWord, RegionTable::max_regions> regions;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// One side's mapping of the words. Untouched parts take no memory.
class ControlPage {
 public:
  ControlPage() noexcept = default;
  ControlPage(ControlPage&& other) noexcept;
  ControlPage& operator=(ControlPage&& other) noexcept;
  ~ControlPage();

  /// Target: makes the memory, sealed against any change of size.
  static Result<ControlPage> create();
  /// Initiator: maps what came over the socket, after checking its size and seals.
  static Result<ControlPage> attach(Fd memfd);

  explicit operator bool() const noexcept { return words_ != nullptr; }
  int memfd() const noexcept { return memfd_.get(); }
  ControlWords& words() const noexcept { return *words_; }

  // ---- target's side
  void give(RegionKey key) const noexcept;
  void revoke(RegionKey key) const noexcept;
  bool busy(RegionKey key) const noexcept;
  void close_target() const noexcept { words_->target_closed.store(1); }
  bool initiator_closed() const noexcept { return words_->initiator_closed.load() != 0; }

  // ---- initiator's side
  void close_initiator() const noexcept { words_->initiator_closed.store(1); }
  bool target_closed() const noexcept { return words_->target_closed.load(std::memory_order_relaxed) != 0; }

 private:
  static Result<ControlPage> map(Fd memfd);

  Fd memfd_;
  ControlWords* words_ = nullptr;
};

/// Initiator: the right to copy to or from one region, held while this object lives. Never hold one
/// for longer than a bounded portion takes.
class BusyMark {
 public:
  enum class Answer { granted, revoked, closed };

  BusyMark(const ControlPage& page, RegionKey key) noexcept;
  ~BusyMark() { word_.busy.fetch_sub(1); }
  BusyMark(const BusyMark&) = delete;
  BusyMark& operator=(const BusyMark&) = delete;
  Answer answer() const noexcept { return answer_; }

 private:
  RegionWord& word_;
  Answer answer_;
};

}  // namespace kvferry::shm
