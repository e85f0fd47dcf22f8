// The endpoint actor: one per address that this engine connects to. Handshake, heartbeats, region
// look-ups, loss. Everything here is off the path of a batch.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <kvferry/actors/caf.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

class EndpointActor final : public caf::event_based_actor {
 public:
  struct Parts {
    std::uint64_t line = 0;  ///< number of its control connection
    std::string address;     ///< tcp://HOST:PORT
    std::string host;        ///< HOST of it
    std::string name;        ///< of this engine
    std::uint64_t incarnation = 0;
    HostFacts facts;
    const EngineConfig* config = nullptr;
    PeerTable* peers = nullptr;
    std::vector<std::shared_ptr<Transport>> transports;  ///< best first
    caf::actor bootstrap;
    caf::actor scheduler;
    /// Hands a transfer whose remote region is known to a poller.
    std::function<void(RefPtr<TransferState>, PeerRecord&)> launch;
  };

  /// How long a peer may take to answer while no rail to it is up.
  static constexpr auto suspect_limit = std::chrono::milliseconds(1000);

  EndpointActor(caf::actor_config& config, Parts parts);
  caf::behavior make_behavior() override;
  void on_exit() override;

 private:
  enum class Phase : std::uint8_t { idle, handshake, connecting, up, suspect, lost, closed };

  /// A transfer or look-up that waits for an answer of the peer.
  struct Parked {
    PeerPtr peer;
    RefPtr<TransferState> transfer;
    RegionPromise answer;
    std::string region;
    std::uint64_t question = 0;  ///< id of the find_region asked since it waits, 0 when none has been
  };

  struct Question {
    std::uint64_t id = 0;
    TimePoint asked_at{};
  };
  using Questions = std::map<std::string, Question, std::less<>>;  ///< by region

  // ---- connecting
  void connect(const ConnectRequest& request);
  void start_handshake();
  void on_welcome(const WelcomeMessage& welcome);
  void on_refused(const Status& why);
  std::vector<RailPlan> plan_rails(const WelcomeMessage& welcome, std::string& reasons) const;
  void fail_waiters(const Status& why);
  void answer_waiters();

  // ---- rails and life
  void on_rails(const RailsChanged& changed);
  void become_up();
  void on_pong(const PongMessage& pong);
  void tick();
  /// Says it, then leaves.
  void declare(PeerState state, Phase phase, const Status& why);
  void declare_stale(Phase phase);
  /// Gives the peer's rails up.
  void leave(PeerState state, Phase phase, const Status& why);
  void disconnect(const Disconnect& request);

  // ---- slow work
  void submit(const SubmitSlowly& request);
  void find_region(const FindRegion& request);
  void park(Parked parked, Duration limit);
  /// Asks for the region, however many wait for it.
  void ask_for_region(const std::string& region);
  void ask_unless_asked(const std::string& region);
  void repeat_questions();
  Questions::iterator find_question(std::uint64_t id);
  void on_region(std::uint64_t question, const RegionMessage& region);
  void on_region_refused(std::uint64_t question, const Status& why);
  std::vector<Parked> take_parked(const std::function<bool(const Parked&)>& which);
  void resolve(Parked& parked, const std::shared_ptr<const RemoteRegion>& region);
  void refuse(Parked& parked, const Status& why);
  void review_parked();

  // ---- ports' requests
  void relay(const RelayRequest& request);
  void on_port_answer(std::uint64_t id, const Result<std::string>& answer);

  void drop_cancelled();
  void refuse_all_parked(const Status& why);

  void on_control(const ControlMessage& message);
  void ask(std::uint64_t id, ControlBody body);
  std::string who() const;

  Parts parts_;
  Phase phase_ = Phase::idle;
  bool dialled_ = false;
  PeerPtr current_;
  std::vector<ConnectPromise> waiters_;
  std::uint64_t handshake_round_ = 0;
  std::uint64_t next_question_ = 1;
  TimePoint last_seen_{};
  TimePoint suspect_since_{};
  TimePoint lost_since_{};  ///< the first loss since it was up; zero while there was none
  bool ticking_ = false;
  std::uint64_t next_parked_ = 1;
  std::map<std::uint64_t, Parked> parked_;
  struct Relayed {
    caf::actor poller;
    std::string transport;
    ChannelId channel = 0;
  };
  std::map<std::uint64_t, Relayed> relayed_;  ///< by id, those without an answer yet
  std::uint64_t next_relayed_ = 1;
  Questions questions_;  ///< by region, those without an answer yet
};

}  // namespace kvferry
