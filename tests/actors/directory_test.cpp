// The directory: what it answers, step by step with given times, and whole clients and servers on loopback.
#include <algorithm>
#include <optional>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include <kvferry/actors/directory_service.hpp>

#include "tests/support/timing.hpp"

namespace kvferry {
namespace {

using namespace std::chrono_literals;
using test::slow;

DirectoryEntry entry_of(const std::string& name, const std::string& role = "decode") {
  return {name, "tcp://127.0.0.1:1", role, "meta of " + name, 7};
}

DirectoryKey key_of(int number) {
  DirectoryKey key{};
  key.fill(static_cast<std::byte>(number));
  return key;
}

/// A service and its clock.
class Service {
 public:
  /// What one client gets for one message; nothing when it has to wait, or is not answered.
  std::optional<DirectoryBody> ask(DirectoryBody body, const std::string& client = "client") {
    const std::string bytes = encode(DirectoryMessage{++id_, std::move(body)});
    return answer_of(raw(bytes, client), client);
  }
  std::vector<DirectoryOutput> raw(const std::string& bytes, const std::string& client = "client") {
    std::vector<DirectoryOutput> output;
    service.receive(client, std::as_bytes(std::span(bytes)), now, output);
    return output;
  }
  std::vector<DirectoryOutput> advance(Duration time) {
    now += time;
    std::vector<DirectoryOutput> output;
    service.tick(now, output);
    return output;
  }
  Errc publish(const DirectoryEntry& entry, int key, std::uint32_t ms = 10000) {
    const auto answer = ask(PublishRequest{entry, key_of(key), ms});
    if (!answer) return Errc::internal;
    const auto* refused = std::get_if<RefusedAnswer>(&*answer);
    return refused ? static_cast<Errc>(refused->code) : Errc::ok;
  }
  std::vector<std::string> names(const std::string& role = {}) {
    std::vector<std::string> names;
    const auto listing = std::get<ListAnswer>(ask(ListRequest{role, {}, 0, 0, 0}).value());
    for (const DirectoryEntry& entry : listing.entries) names.push_back(entry.name);
    return names;
  }
  static std::optional<DirectoryBody> answer_of(const std::vector<DirectoryOutput>& output, const std::string& client) {
    for (const DirectoryOutput& one : output)
      if (one.routing == client) return decode_directory_message(std::as_bytes(std::span(one.bytes))).value().body;
    return std::nullopt;
  }

  DirectoryService service{99};
  TimePoint now{1h};

 private:
  std::uint64_t id_ = 0;
};

using Names = std::vector<std::string>;

TEST(DirectoryService, FindsWhatIsPublished) {
  Service directory;
  EXPECT_EQ(directory.publish(entry_of("b"), 1), Errc::ok);
  EXPECT_EQ(directory.publish(entry_of("a", "prefill"), 2), Errc::ok);
  EXPECT_EQ(std::get<EntryAnswer>(*directory.ask(FindRequest{"b"})).entry, entry_of("b"));
  EXPECT_EQ(std::get<RefusedAnswer>(*directory.ask(FindRequest{"c"})).code,
            static_cast<std::uint32_t>(Errc::unreachable));
  EXPECT_EQ(directory.names(), (Names{"a", "b"}));
  EXPECT_EQ(directory.names("decode"), Names{"b"});
  EXPECT_EQ(directory.names("router"), Names{});
}

TEST(DirectoryService, AnEntryEndsWithoutHeartbeats) {
  Service directory;
  EXPECT_EQ(directory.publish(entry_of("a"), 1, 1000), Errc::ok);
  EXPECT_EQ(directory.publish(entry_of("b"), 1, 1000), Errc::ok);
  directory.advance(900ms);
  EXPECT_EQ(directory.publish(entry_of("b"), 1, 1000), Errc::ok) << "a heartbeat";
  directory.advance(99ms);
  EXPECT_EQ(directory.names(), (Names{"a", "b"}));
  EXPECT_EQ(directory.service.next_tick(), directory.now + 1ms);
  directory.advance(1ms);
  EXPECT_EQ(directory.names(), Names{"b"});
  directory.now += 10s;  // nobody ticks: what is asked must be right all the same
  EXPECT_EQ(std::get<RefusedAnswer>(*directory.ask(FindRequest{"b"})).code,
            static_cast<std::uint32_t>(Errc::unreachable));
}

TEST(DirectoryService, OnlyTheHolderOfTheKeyChangesAnEntry) {
  Service directory;
  EXPECT_EQ(directory.publish(entry_of("a"), 1, 1000), Errc::ok);
  DirectoryEntry changed = entry_of("a");
  changed.address = "tcp://10.0.0.1:9";
  EXPECT_EQ(directory.publish(changed, 2), Errc::access_denied);
  const auto refused = directory.ask(WithdrawRequest{"a", key_of(2)});
  EXPECT_EQ(std::get<RefusedAnswer>(*refused).code, static_cast<std::uint32_t>(Errc::access_denied));
  EXPECT_EQ(std::get<EntryAnswer>(*directory.ask(FindRequest{"a"})).entry, entry_of("a"));
  EXPECT_EQ(directory.publish(changed, 1, 1000), Errc::ok);
  EXPECT_EQ(std::get<EntryAnswer>(*directory.ask(FindRequest{"a"})).entry, changed);
  directory.advance(1s);
  EXPECT_EQ(directory.publish(entry_of("a"), 2), Errc::ok) << "once its time is over the name is free";
  EXPECT_TRUE(std::holds_alternative<DoneAnswer>(*directory.ask(WithdrawRequest{"a", key_of(2)})));
  EXPECT_EQ(directory.names(), Names{});
}

TEST(DirectoryService, TellsWatchersOfTheirRoleAlone) {
  Service directory;
  EXPECT_EQ(directory.publish(entry_of("a"), 1, 60000), Errc::ok);
  const auto first = std::get<ListAnswer>(*directory.ask(ListRequest{"decode", {}, 0, 0, 5000}, "watcher"));
  ASSERT_EQ(first.entries.size(), 1u) << "a watcher that knows nothing is answered at once";
  const ListRequest next{"decode", {}, first.instance, first.version, 5000};
  EXPECT_FALSE(directory.ask(next, "watcher"));
  const auto publish = [&](const DirectoryEntry& entry, int key) {
    return Service::answer_of(directory.raw(encode(DirectoryMessage{1, PublishRequest{entry, key_of(key), 60000}})),
                              "watcher");
  };
  EXPECT_FALSE(publish(entry_of("p", "prefill"), 2)) << "another role";
  EXPECT_FALSE(publish(entry_of("a"), 1)) << "a heartbeat is no news";
  const auto news = publish(entry_of("b"), 3);
  ASSERT_TRUE(news);
  EXPECT_EQ(std::get<ListAnswer>(*news).entries.size(), 2u);
  EXPECT_FALSE(publish(entry_of("c"), 4)) << "answered once";
}

TEST(DirectoryService, TellsWatchersOfWhatIsGoneAndAnswersInTime) {
  Service directory;
  EXPECT_EQ(directory.publish(entry_of("a"), 1, 1000), Errc::ok);
  const auto known = std::get<ListAnswer>(*directory.ask(ListRequest{"decode", {}, 0, 0, 0}));
  EXPECT_FALSE(directory.ask(ListRequest{"decode", {}, known.instance, known.version, 5000}, "watcher"));
  EXPECT_FALSE(directory.ask(ListRequest{"prefill", {}, known.instance, known.version, 3000}, "other"));
  const auto gone = Service::answer_of(directory.advance(1s), "watcher");
  ASSERT_TRUE(gone);
  EXPECT_TRUE(std::get<ListAnswer>(*gone).entries.empty());
  EXPECT_TRUE(directory.advance(1999ms).empty());
  EXPECT_TRUE(Service::answer_of(directory.advance(1ms), "other")) << "at the end of its time";
  EXPECT_TRUE(directory.ask(ListRequest{"decode", {}, known.instance + 1, 1000, 5000}, "watcher"))
      << "what another directory said is not comparable";
}

TEST(DirectoryService, ListsInPages) {
  Service directory;
  for (std::uint32_t i = 0; i < 2 * max_entries_at_once + 5; ++i)
    EXPECT_EQ(directory.publish(entry_of("e" + std::to_string(100000 + i)), 1), Errc::ok);
  ListRequest request{"decode", {}, 0, 0, 0};
  std::size_t entries = 0;
  for (int page = 0; page < 3; ++page) {
    const auto answer = std::get<ListAnswer>(*directory.ask(request));
    EXPECT_EQ(answer.more, page < 2);
    entries += answer.entries.size();
    request.after = answer.entries.back().name;
  }
  EXPECT_EQ(entries, 2 * max_entries_at_once + 5);
}

TEST(DirectoryService, HoldsItsLimits) {
  Service directory;
  EXPECT_EQ(directory.publish(entry_of(""), 1), Errc::invalid_argument);
  EXPECT_EQ(directory.publish(entry_of(std::string(256, 'n')), 1), Errc::invalid_argument);
  EXPECT_EQ(directory.publish(entry_of("a", std::string(65, 'r')), 1), Errc::invalid_argument);
  EXPECT_EQ(directory.publish(entry_of("a"), 1, least_entry_ms - 1), Errc::invalid_argument);
  EXPECT_EQ(directory.publish(entry_of("a"), 1, most_entry_ms + 1), Errc::invalid_argument);
  DirectoryEntry large = entry_of("a");
  large.metadata.assign(1025, 'm');
  EXPECT_FALSE(directory.ask(PublishRequest{large, key_of(1), 1000})) << "malformed: beyond what a message may hold";
  EXPECT_TRUE(directory.raw(std::string(max_directory_request + 1, 'x')).empty());
  EXPECT_EQ(directory.service.size(), 0u);
  for (std::size_t i = 0; i < DirectoryService::max_watchers + 1; ++i) {
    const auto output = directory.raw(encode(DirectoryMessage{i, ListRequest{{}, {}, 99, 1, 5000}}), std::to_string(i));
    EXPECT_EQ(output.empty(), i < DirectoryService::max_watchers) << "the oldest gives way";
    EXPECT_TRUE(output.empty() || output.front().routing == "0");
  }
}

TEST(DirectoryService, ManyRolesAreStillWatched) {
  Service directory;
  for (int i = 0; i < 5000; ++i)
    EXPECT_EQ(directory.publish(entry_of(std::to_string(i), "role" + std::to_string(i)), 1), Errc::ok);
  const auto known = std::get<ListAnswer>(*directory.ask(ListRequest{"late", {}, 0, 0, 0}));
  EXPECT_FALSE(directory.ask(ListRequest{"late", {}, known.instance, known.version, 5000}, "watcher"));
  const auto output =
      directory.raw(encode(DirectoryMessage{1, PublishRequest{entry_of("x", "late"), key_of(1), 1000}}));
  EXPECT_TRUE(Service::answer_of(output, "watcher"));
}

TEST(DirectoryService, SurvivesAnyBytes) {
  Service directory;
  std::mt19937 random(9);
  const std::vector<std::string> good{encode(DirectoryMessage{1, PublishRequest{entry_of("a"), key_of(1), 1000}}),
                                      encode(DirectoryMessage{2, ListRequest{"decode", "a", 1, 2, 100}}),
                                      encode(DirectoryMessage{3, FindRequest{"a"}}),
                                      encode(DirectoryMessage{4, WithdrawRequest{"a", key_of(1)}})};
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good[random() % good.size()];
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    directory.raw(bytes);
  }
  EXPECT_EQ(directory.publish(entry_of("after"), 1), Errc::ok);
}

TEST(DirectoryService, NamesBothVersions) {
  Service directory;
  std::string bytes = encode(DirectoryMessage{1, FindRequest{"a"}});
  bytes[bytes.find('v') + 1] = 2;
  const auto answer = Service::answer_of(directory.raw(bytes), "client");
  ASSERT_TRUE(answer);
  const auto& refused = std::get<RefusedAnswer>(*answer);
  EXPECT_EQ(refused.code, static_cast<std::uint32_t>(Errc::version_mismatch));
  EXPECT_NE(refused.text.find('2'), std::string::npos);
  EXPECT_NE(refused.text.find('1'), std::string::npos);
}

// ---------------------------------------------------------------- whole

DirectoryClient client_of(std::vector<std::string> directories, std::chrono::milliseconds time = 600ms) {
  return DirectoryClient::start({.directories = std::move(directories), .time = time, .limit = 500ms}).value();
}

template <class Condition>
bool eventually(Duration limit, Condition&& condition) {
  const TimePoint until = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

TEST(Directory, ClientsFindEachOther) {
  const auto server = DirectoryServer::start("tcp://127.0.0.1:0").value();
  DirectoryClient one = client_of({server.address()});
  DirectoryClient two = client_of({server.address()});
  ASSERT_TRUE(one.publish(entry_of("a")));
  EXPECT_EQ(two.find("a").value(), entry_of("a"));
  EXPECT_EQ(two.find("b").status().code(), Errc::unreachable);
  EXPECT_EQ(two.publish(entry_of("a")).code(), Errc::access_denied);
  ASSERT_TRUE(two.withdraw("a").code() == Errc::access_denied);
  EXPECT_EQ(two.list("decode")->entries.size(), 1u);
  std::this_thread::sleep_for(900ms);
  EXPECT_TRUE(two.find("a")) << "kept by heartbeats beyond its time";
  ASSERT_TRUE(one.withdraw("a"));
  EXPECT_FALSE(two.find("a"));
}

TEST(Directory, WithdrawsWithItsClient) {
  const auto server = DirectoryServer::start("tcp://127.0.0.1:0").value();
  DirectoryClient other = client_of({server.address()});
  {
    DirectoryClient gone = client_of({server.address()}, 60s);
    ASSERT_TRUE(gone.publish(entry_of("a")));
    ASSERT_TRUE(other.find("a"));
  }
  EXPECT_FALSE(other.find("a"));
}

TEST(Directory, ARestartedDirectoryKnowsAllAfterOneHeartbeat) {
  std::optional<DirectoryServer> server = DirectoryServer::start("tcp://127.0.0.1:0").value();
  const std::string address = server->address();
  DirectoryClient client = client_of({address});
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(client.publish(entry_of(name)));
  server.reset();
  EXPECT_EQ(client.find("a").status().code(), Errc::unreachable);
  server = DirectoryServer::start(address).value();
  const TimePoint begun = Clock::now();
  EXPECT_TRUE(eventually(slow(5s), [&] {
    const auto listing = client.list("decode");
    return listing && listing->entries.size() == 3;
  }));
  EXPECT_LT(Clock::now() - begun, slow(1500ms)) << "a heartbeat, one that had no answer, and the questions between";
}

TEST(Directory, AnyOneOfSeveralSuffices) {
  std::optional<DirectoryServer> first = DirectoryServer::start("tcp://127.0.0.1:0").value();
  const auto second = DirectoryServer::start("tcp://127.0.0.1:0").value();
  const std::vector<std::string> both{first->address(), second.address()};
  DirectoryClient client = client_of(both);
  DirectoryClient other = client_of(both);
  ASSERT_TRUE(client.publish(entry_of("a")));
  const auto known = other.watch("decode", {}, 1s).value();
  EXPECT_EQ(known.entries.size(), 1u);
  first.reset();
  EXPECT_EQ(other.find("a").value(), entry_of("a"));
  ASSERT_TRUE(client.publish(entry_of("b")));
  EXPECT_EQ(other.list("")->entries.size(), 2u);
  EXPECT_EQ(other.watch("decode", known, 2s)->entries.size(), 2u) << "the other one goes on telling";
}

TEST(Directory, WatchersLearnAtOnce) {
  const auto server = DirectoryServer::start("tcp://127.0.0.1:0").value();
  DirectoryClient watcher = client_of({server.address()});
  DirectoryClient client = client_of({server.address()});
  auto known = watcher.watch("decode", {}, 5s).value();
  EXPECT_TRUE(known.entries.empty());
  const TimePoint begun = Clock::now();
  std::thread later([&] {
    std::this_thread::sleep_for(100ms);
    EXPECT_TRUE(client.publish(entry_of("p", "prefill")));
    EXPECT_TRUE(client.publish(entry_of("a")));
  });
  known = watcher.watch("decode", known, slow(5s)).value();
  later.join();
  EXPECT_EQ(known.entries, std::vector<DirectoryEntry>{entry_of("a")});
  EXPECT_LT(Clock::now() - begun, slow(1500ms));
  const TimePoint again = Clock::now();
  EXPECT_EQ(watcher.watch("decode", known, 300ms)->entries.size(), 1u) << "nothing new within the limit";
  EXPECT_GE(Clock::now() - again, 290ms);
}

TEST(Directory, SaysWhoDoesNotAnswer) {
  DirectoryClient client = client_of({"tcp://127.0.0.1:1"});
  const Status status = client.publish(entry_of("a"));
  EXPECT_EQ(status.code(), Errc::unreachable);
  EXPECT_NE(status.text().find("tcp://127.0.0.1:1"), std::string_view::npos) << status.text();
  EXPECT_EQ(client.list("").status().code(), Errc::unreachable);
  EXPECT_EQ(client.watch("", {}, 1s).status().code(), Errc::unreachable);
  EXPECT_EQ(DirectoryClient::start({}).status().code(), Errc::invalid_argument);
  EXPECT_EQ(DirectoryClient::start({.directories = {"udp://x"}}).status().code(), Errc::invalid_argument);
  EXPECT_EQ(DirectoryClient::start({.directories = {"tcp://x:1"}, .time = 1ms}).status().code(),
            Errc::invalid_argument);
}

TEST(Directory, SaysWhyItCanNotListen) {
  const auto server = DirectoryServer::start("tcp://127.0.0.1:0").value();
  EXPECT_EQ(DirectoryServer::start(server.address()).status().code(), Errc::address_in_use);
  for (const char* address : {"", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
                              "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1"})
    EXPECT_EQ(DirectoryServer::start(address).status().code(), Errc::invalid_argument) << address;
}

}  // namespace
}  // namespace kvferry
