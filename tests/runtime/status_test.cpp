#include <set>
#include <string>

#include <gtest/gtest.h>

#include <kvferry/runtime/status.hpp>

namespace kvferry {
namespace {

TEST(Status, SuccessHasNoText) {
  const Status status = Status::ok();
  EXPECT_TRUE(status.is_ok());
  EXPECT_TRUE(static_cast<bool>(status));
  EXPECT_EQ(status.text(), "");
  EXPECT_EQ(status.to_string(), "ok");
}

TEST(Status, ErrorCarriesCodeAndText) {
  const Status status(Errc::peer_lost, "peer 'decode-0' did not answer for 3 s");
  EXPECT_FALSE(status.is_ok());
  EXPECT_EQ(status.code(), Errc::peer_lost);
  EXPECT_TRUE(status == Errc::peer_lost);
  EXPECT_EQ(status.to_string(), "peer_lost: peer 'decode-0' did not answer for 3 s");
}

TEST(Status, CopiesShareTheText) {
  const Status status(Errc::corrupted, "a text that is longer than any small-string buffer");
  const Status copy = status;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(copy.text().data(), status.text().data());
}

TEST(Status, ContextGoesBeforeTheText) {
  const Status status = Status(Errc::out_of_bounds, "slice 3 ends at 4097 of 4096").with_context("peer 'p'");
  EXPECT_EQ(status.code(), Errc::out_of_bounds);
  EXPECT_EQ(status.text(), "peer 'p': slice 3 ends at 4097 of 4096");
  EXPECT_EQ(Status(Errc::timed_out, "").with_context("connect").text(), "connect");
  EXPECT_TRUE(Status::ok().with_context("anything").is_ok());
}

TEST(Status, EveryCodeHasItsOwnName) {
  std::set<std::string_view> names;
  const auto last = static_cast<std::uint16_t>(Errc::internal);
  for (std::uint16_t code = 0; code <= last; ++code) {
    const std::string_view name = to_string(static_cast<Errc>(code));
    EXPECT_NE(name, "unknown_error") << code;
    EXPECT_TRUE(names.insert(name).second) << name << " names two codes";
  }
  EXPECT_EQ(to_string(static_cast<Errc>(last + 1)), "unknown_error");
}

TEST(Result, HoldsAValueOrAStatus) {
  Result<std::string> good(std::string("value"));
  ASSERT_TRUE(good);
  EXPECT_EQ(*good, "value");
  EXPECT_EQ(good->size(), 5u);
  EXPECT_TRUE(good.status().is_ok());

  const Result<std::string> bad(Errc::no_path, "no transport joins them");
  EXPECT_FALSE(bad);
  EXPECT_EQ(bad.status().to_string(), "no_path: no transport joins them");
}

TEST(Result, ValueThrowsTheStatus) {
  const Result<int> bad(Errc::unreachable, "nobody listens at tcp://127.0.0.1:1");
  try {
    bad.value();
    FAIL() << "value() returned without a value";
  } catch (const StatusError& error) {
    EXPECT_EQ(error.status().code(), Errc::unreachable);
    EXPECT_STREQ(error.what(), "unreachable: nobody listens at tcp://127.0.0.1:1");
  }
}

TEST(Result, MovesItsValueOut) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> value = std::move(result).value();
  EXPECT_EQ(*value, 7);
}

}  // namespace
}  // namespace kvferry
