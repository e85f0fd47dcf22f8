// The poller's work without its actor: takes transfers, cuts them into items, posts them to rails,
// polls, retries, times out, completes. One thread only; time is given from outside, so that tests
// drive it step by step.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <memory_resource>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <kvferry/actors/peer_table.hpp>
#include <kvferry/actors/submissions.hpp>
#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/metrics.hpp>
#include <kvferry/runtime/transfer_state.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

/// One rail to be opened: which transport, how good, where to.
struct RailSpec {
  std::uint32_t rail = 0;  ///< the scheduler's number
  std::uint32_t tier = 0;  ///< lower is used first; rails of one tier share the load
  std::string transport;
  bool one_sided = false;  ///< Transport::one_sided
  ChannelSpec channel;
};

/// What a poller reports; called on its thread from inside step().
/// What PortEvents::on_request() was given, and where to.
struct PortRequest {
  std::uint32_t peer = 0;
  ChannelId channel = 0;
  std::string transport;
  std::string address;  ///< of the peer's port
  std::string bytes;
};

class PollerEvents {
 public:
  virtual ~PollerEvents() = default;
  virtual void rail_up(std::uint32_t peer, std::uint32_t rail) = 0;
  virtual void rail_down(std::uint32_t peer, std::uint32_t rail, const Status& why) = 0;
  /// A port's words to the peer's port at `address`; the answer comes back to PollerCore::on_answer().
  virtual void request(const PortRequest& request) = 0;
  /// No rail of this poller can carry the transfer any more; nothing of it is in flight.
  virtual void orphaned(RefPtr<TransferState> transfer, const Status& why) = 0;
};

class PollerCore {
 public:
  struct Parts {
    std::uint32_t group = 0;
    std::uint32_t groups = 1;  ///< how many pollers the engine has
    const EngineConfig* config = nullptr;
    PeerTable* peers = nullptr;
    NotificationQueue* notifications = nullptr;
    RegionTable* regions = nullptr;
    MetricCounters* metrics = nullptr;
    Submissions* submissions = nullptr;
    PollerEvents* events = nullptr;
  };

  /// `message_arrived` is called when a message for some receive has come in: receives are matched by
  /// group 0, which may be another poller.
  explicit PollerCore(const Parts& parts, std::function<void()> message_arrived = {});
  /// Ends what still runs with shutting_down, after closing the ports.
  ~PollerCore();
  PollerCore(const PollerCore&) = delete;
  PollerCore& operator=(const PollerCore&) = delete;

  /// Opens this poller's port of a transport. Before the first step.
  Status add_port(Transport& transport, const PortContext& context);
  /// The ports' addresses for the handshake: transport → address.
  std::vector<PortAdvert> adverts() const;
  /// Initiator's side: what became of a request.
  void on_answer(const std::string& transport, ChannelId channel, const Result<std::string>& answer);
  /// Target's side: lets the port of that address answer a request of a peer's port.
  Result<std::string> serve(const std::string& transport, const std::string& address, std::string_view request);

  // ---- commands
  void open_rail(std::uint32_t peer, const RailSpec& spec);
  /// Ends all work for the peer with `why` and closes its rails.
  void close_peer(std::uint32_t peer, const Status& why);
  /// Ends local work on the region and withdraws it from peers; calls `done` when it is quiet.
  void release_region(RegionKey region, TimePoint now, std::function<void()> done);
  void drop_session(SessionId session);
  /// Ends everything with `why`; idle() turns true soon after.
  void stop(const Status& why);

  /// One bounded round of everything. What it says tells whether to step again at once.
  Progress step(TimePoint now);
  /// When step wants to be called even if nothing wakes the poller.
  TimePoint next_wakeup() const;
  bool idle() const noexcept { return active_count_ == 0; }
  std::vector<int> wait_fds() const;

 private:
  struct Rail;
  struct Lane;
  struct Job;
  class PortSlot;

  /// One item: a piece of a job, in flight or waiting to be posted again.
  struct Chunk {
    Job* job = nullptr;
    Rail* rail = nullptr;  ///< null while it waits
    Chunk* next = nullptr;
    Chunk* previous = nullptr;
    SliceRange range;
    Op op = Op::read;
    std::uint32_t index = 0;
    std::uint32_t use = 0;  ///< distinguishes successive uses in cookies
    std::uint64_t sequence = 0;
    std::uint64_t bytes = 0;
    std::uint64_t post_number = 0;  ///< counts posts of this poller
    TimePoint posted{};
  };

  struct ChunkList {
    Chunk* head = nullptr;
    Chunk* tail = nullptr;
    bool empty() const noexcept { return head == nullptr; }
    void push_back(Chunk* chunk) noexcept;
    void remove(Chunk* chunk) noexcept;
  };

  /// A transfer under way.
  struct Job {
    RefPtr<TransferState> transfer;
    Lane* lane = nullptr;
    Job* next = nullptr;  ///< in the list of active jobs
    Job* previous = nullptr;
    SliceCursor cursor;
    ChunkList in_flight;
    ChunkList waiting;
    std::uint32_t outstanding = 0;
    std::uint32_t failures = 0;
    std::uint64_t failures_until = 0;  ///< last post when a failure was counted last
    std::uint32_t excluded = 0;        ///< bit per port that can not carry it
    std::uint64_t done_bytes = 0;
    std::uint64_t order = 0;
    bool queued = false;
    bool cut = false;             ///< some of it has been cut
    bool immediate_sent = false;  ///< write_imm: the item with the immediate has been made
    Status ending;                ///< set: nothing more is posted, the job ends so once quiet
    TimePoint fence_at = TimePoint::max();
    Status last_error;
  };

  struct EarlierFirst {
    bool operator()(const Job* a, const Job* b) const noexcept;
  };
  using JobQueue = std::pmr::set<Job*, EarlierFirst>;

  struct Rail {
    RailSpec spec;
    PortSlot* port = nullptr;
    std::uint32_t port_bit = 0;
    ChannelId channel = 0;
    bool open = false;  ///< a channel exists (connecting or up)
    bool up = false;
    std::uint32_t items = 0;
    std::uint64_t bytes = 0;
    double ns_per_byte = 0.1;
    std::uint64_t blocked_in_step = 0;  ///< refused an item in that step
    Status last_error;
  };

  struct Lane {
    std::uint32_t peer = 0;
    std::shared_ptr<PeerRecord> record;
    std::vector<std::unique_ptr<Rail>> rails;
    std::array<JobQueue, 3> queues;
    std::deque<Job*> messages;          ///< sends, in order
    std::vector<Chunk*> message_retry;  ///< sends to repeat, by sequence
    std::deque<Job*> receives;
    std::uint32_t messages_outstanding = 0;
    Rail* message_rail = nullptr;
    std::uint32_t served_in_row = 0;                              ///< items served past a waiting lower class
    std::vector<std::pair<RegionKey, std::uint32_t>> impossible;  ///< region → bits of ports that can not reach it
    bool dirty = false;
    Status closed;                 ///< set: the peer is gone
    std::vector<RailSpec> reopen;  ///< rails to open once this closed lane is gone
    std::uint32_t jobs = 0;
    explicit Lane(std::pmr::memory_resource* memory) : queues{JobQueue(memory), JobQueue(memory), JobQueue(memory)} {}
  };

  struct Release {
    RegionKey region;
    TimePoint force_at;
    std::function<void()> done;
  };

  static constexpr std::uint32_t max_failures = 8;
  /// Messages that nobody takes stay in flight: they must leave most of a channel to the transfers.
  static constexpr std::uint32_t message_window = 16;
  static constexpr std::uint32_t aging_period = 16;

  // ---- taking in
  void take_submissions();
  void accept(RefPtr<TransferState> transfer);
  void accept_receive(Job& job);
  bool post_at_once(Lane& lane, Job& job);
  Lane& lane_of(std::uint32_t peer);

  // ---- posting
  void pump();
  void pump(Lane& lane);
  void pump_messages(Lane& lane);
  void pump_receives();
  Job* next_job(Lane& lane);
  /// False when the job can not go on now.
  bool post_next(Lane& lane, Job& job);
  Chunk* next_chunk(Job& job, const PortLimits& limits);
  bool post(Rail& rail, Chunk& chunk);
  Rail* pick_rail(const Lane& lane, const Job& job, bool& hopeless) const;
  static std::uint64_t detour_of(const Rail& rail, const Job& job);
  Rail* pick_message_rail(Lane& lane);
  bool another_group_is_up(const Lane& lane) const;
  std::uint64_t immediate_sequence(TransferState& transfer) noexcept;

  // ---- completions
  void poll_ports();
  void on_completion(PortSlot& port, const Completion& completion);
  void settle(Chunk& chunk, const Status& status);
  void retry(Chunk& chunk, const Status& status);
  void advance(Job& job);
  void begin_end(Job& job, Status status, Duration grace);
  void finish(Job& job, Status status);
  void orphan(Job& job, const Status& why);

  // ---- rails
  void on_channel(PortSlot& port, ChannelId channel, bool up, const Status& why);
  void try_open(Lane& lane, Rail& rail);
  static bool no_rail_is_up(const Lane& lane);
  Status no_rail_status(const Lane& lane) const;

  // ---- time
  void expire();
  void fence_overdue();
  void work_on_releases();
  std::string describe(const Job& job) const;
  Status cancelled(const Job& job) const;

  // ---- bookkeeping
  Job* new_job(RefPtr<TransferState> transfer, Lane& lane);
  RefPtr<TransferState> free_job(Job& job);
  Chunk* new_chunk(Job& job);
  void free_chunk(Chunk& chunk);
  void enqueue(Job& job);
  void dequeue(Job& job);
  void erase_closed_lanes();

  const Parts parts_;
  const std::function<void()> message_arrived_;
  TimePoint now_{};
  std::uint64_t step_ = 0;
  std::vector<std::unique_ptr<PortSlot>> ports_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Lane>> lanes_;
  std::pmr::unsynchronized_pool_resource memory_;

  std::deque<Job> job_storage_;
  std::vector<Job*> free_jobs_;
  std::deque<Chunk> chunk_storage_;
  std::vector<Chunk*> free_chunks_;

  Job* active_ = nullptr;
  std::size_t active_count_ = 0;
  std::size_t receives_ = 0;
  std::uint64_t next_order_ = 1;
  std::uint64_t next_sequence_ = 1;
  std::uint64_t last_post_ = 0;
  TimePoint earliest_deadline_ = TimePoint::max();
  TimePoint earliest_fence_ = TimePoint::max();
  TimePoint retry_at_ = TimePoint::max();
  std::vector<Release> releases_;
  bool any_dirty_ = false;
  bool made_progress_ = false;
  bool closing_lanes_ = false;
  Status stopped_;
};

}  // namespace kvferry
