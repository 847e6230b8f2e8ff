// Where random programs get their choices from: a seed, or the bytes of a fuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

class Choices {
 public:
  virtual ~Choices() = default;
  // A number below `limit`, which is not 0.
  virtual std::size_t below(std::size_t limit) = 0;
  // Whether the program goes on.
  virtual bool another_step() = 0;
};

class SeededChoices : public Choices {
 public:
  SeededChoices(unsigned seed, int steps) : random_(seed), steps_(steps) {}

  std::size_t below(std::size_t limit) override {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random_);
  }

  bool another_step() override { return steps_-- > 0; }

 private:
  std::mt19937 random_;
  int steps_;
};

// A byte a choice, two if it has more than 256 outcomes; the program ends with the bytes.
class ByteChoices : public Choices {
 public:
  ByteChoices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::size_t below(std::size_t limit) override {
    std::size_t number = next();
    if (limit > 256) number = number << 8 | next();
    return number % limit;
  }

  bool another_step() override { return size_ > 0; }

 private:
  std::size_t next() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }

  const std::uint8_t* data_;
  std::size_t size_;
};
