"""What `/metrics` says, in Prometheus's text: counted where clients are answered, in the HTTP process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Gauges:
    """Counters and latencies of one server. Times come in nanoseconds and are told in seconds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._outstanding = Gauge("loop_requests_outstanding", "Requests that wait or run", registry=registry)
        self._ended = Counter("loop_requests", "Requests that have ended", ["status"], registry=registry)
        self._refused = Counter(
            "loop_http_refused", "Requests that the engine never saw", ["code"], registry=registry
        )
        self._prompt = Counter("loop_prompt_tokens", "Prompt tokens asked with", registry=registry)
        self._output = Counter("loop_output_tokens", "Tokens sent to clients", registry=registry)
        self._ttft = self._histogram("loop_ttft_seconds", "From a request's head to its first token")
        self._itl = self._histogram("loop_itl_seconds", "Between two tokens of a request")
        self._e2e = self._histogram("loop_e2e_seconds", "From a request's head to the end of its answer")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self._registry)

    def asked(self, prompt_tokens: int, num_outstanding: int) -> None:
        self._prompt.inc(prompt_tokens)
        self._outstanding.set(num_outstanding)

    def tokens(self, received_ns: int, last_ns: int | None, now_ns: int, count: int, at_once: bool) -> None:
        """`count` tokens were sent at `now_ns`; the one before them at `last_ns` (None: they are the first).
        Of a whole answer, sent `at_once`, there are no latencies of tokens."""
        self._output.inc(count)
        if at_once:
            return
        if last_ns is None:
            self._ttft.observe((now_ns - received_ns) / 1e9)
            count, last_ns = count - 1, now_ns
        for at in range(count):
            self._itl.observe((now_ns - last_ns) / 1e9 if at == 0 else 0.0)

    def answered(self, received_ns: int, finished_ns: int) -> None:
        self._e2e.observe((finished_ns - received_ns) / 1e9)

    def ended(self, status: str, num_outstanding: int) -> None:
        self._ended.labels(status).inc()
        self._outstanding.set(num_outstanding)

    def refused(self, code: int) -> None:
        self._refused.labels(str(code)).inc()

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))
