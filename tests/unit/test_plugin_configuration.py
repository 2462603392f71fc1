"""What plugins say before an engine starts: options, changes, problems; and the parts that they add. Without a device."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any

import pytest
from oarlock import extensions, plugins
from oarlock.backend_api import ConfigChange, DeviceSpec, Extension, OptionSpec, Problem
from oarlock.cli import main
from oarlock.config import options
from oarlock.config.options import plugins as option_rows
from oarlock.config.parser import make_parser, parse
from oarlock.config.resolve import from_dict, from_kwargs, resolve, to_dict
from oarlock.engine import launch
from oarlock.engine.sinks import Feed, StatsLog, make_feed
from oarlock.errors import BackendNotFound, ConfigError, PluginError, UnsupportedByBackend
from oarlock.executor import make_executor
from oarlock.messages import EngineOutput, EngineOutputs, SchedulerStats
from oarlock.model_summary import ModelSummary
from oarlock.plugins import DEVICE_GROUP, PLUGIN_GROUP, Catalogue, worker_plugins
from plugin_fakes import Dist, Entry, available, broken, catalogue, feature, module

SUMMARY = ModelSummary(path="", architecture="TestForCausalLM", num_layers=1, vocab_size=10)
DEPTH = OptionSpec("extra", "depth", "int", 3, "How deep.")


def with_hooks(name: str, group: str = PLUGIN_GROUP, **hooks: Any) -> Entry:
    if group == DEVICE_GROUP:
        spec = DeviceSpec(name, available, "m:D", f"oarlock-{name}", priority=0)
        hooks["devices"] = lambda: [spec]
    return Entry(name, group, Dist(f"oarlock-{name}"), lambda: module(**hooks))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make these entries all that is installed."""

    def put(*entries: Entry) -> Catalogue:
        found = catalogue(*entries)
        assert not found.broken(), found.broken()[0].detail
        use(found)
        return found

    def use(found: Catalogue) -> Catalogue:
        for place in (plugins, extensions, options, option_rows, launch):
            monkeypatch.setattr(place, "installed", lambda: found)
        return found

    put.use = use  # type: ignore[attr-defined]
    return put


def host(**hooks: Any) -> Entry:
    return with_hooks("host", DEVICE_GROUP, **hooks)


def prepare(**values: Any) -> Any:
    return launch.prepare(resolve({"model": "m", "device": "host", **values}).engine, SUMMARY)


# ---------------------------------------------------------------- options
def test_an_option_is_typed_on_the_command_line_or_as_a_keyword(install: Any) -> None:
    install(host(), with_hooks("extra", options=lambda: [DEPTH, OptionSpec("extra", "deep-too", "bool", False, "x")]))
    typed = parse(make_parser(), ["m", "--extra_depth", "5", "--extra-deep-too"])
    assert resolve(typed).engine.device.options == {"extra_depth": 5, "extra_deep_too": True}
    assert from_kwargs("m", extra_depth=5, extra_deep_too=True).engine.device.options == {"extra_depth": 5, "extra_deep_too": True}
    assert "--extra-depth N" in make_parser().format_help() and "Plugin oarlock-extra" in make_parser().format_help()


def test_the_device_gets_every_option_typed_or_default(install: Any) -> None:
    install(host(options=lambda: [OptionSpec("host", "level", "float", 1.5, "x")]), with_hooks("extra", options=lambda: [DEPTH]))
    assert prepare(extra_depth="4").config.device.options == {"extra_depth": 4, "host_level": 1.5}


def test_options_survive_the_way_into_the_engine_process(install: Any) -> None:
    install(host(), with_hooks("extra", options=lambda: [DEPTH]))
    config = prepare(extra_depth="4").config
    assert from_dict(to_dict(config)) == config and config.typed == ("device.device", "device.options.extra_depth", "model.model")


@pytest.mark.parametrize("raw", ["x", "1.5", True])
def test_the_value_of_an_option_is_checked_by_its_type(install: Any, raw: Any) -> None:
    install(host(), with_hooks("extra", options=lambda: [DEPTH]))
    with pytest.raises(ConfigError, match="extra.depth.*whole number"):
        from_kwargs("m", extra_depth=raw)


def test_an_option_of_a_device_that_was_not_chosen_is_refused(install: Any) -> None:
    install(host(), with_hooks("other", DEVICE_GROUP, options=lambda: [OptionSpec("other", "x", "int", 1, "x")]))
    assert prepare().config.device.options == {}
    with pytest.raises(ConfigError, match="--other-x is of oarlock-other and does nothing on host; leave it out, or take --device other"):
        prepare(other_x=1)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([OptionSpec("block", "size", "int", 1, "x")], "--block-size comes from oarlock itself and oarlock-extra"),
        ([DEPTH, DEPTH], "--extra-depth comes from oarlock-extra and oarlock-extra"),
    ],
)
def test_two_options_of_one_name_name_both_owners(install: Any, specs: list[OptionSpec], words: str) -> None:
    install(host(), with_hooks("extra", options=lambda: specs))
    with pytest.raises(PluginError, match=words):
        make_parser()


@pytest.mark.parametrize(
    "spec",
    [OptionSpec("Extra", "x", "int", 1, ""), OptionSpec("extra", "x_y", "int", 1, ""), OptionSpec("e", "x", "int", 1.5, ""), OptionSpec("e", "x", "list", 1, ""), "x"],  # type: ignore[arg-type]
)
def test_an_impossible_option_makes_the_plugin_broken(spec: Any) -> None:
    (bad,) = catalogue(with_hooks("extra", options=lambda: [spec])).broken()
    assert "oarlock-extra" in bad.error


def test_an_unknown_option_names_the_plugins_that_may_have_it(install: Any) -> None:
    install.use(catalogue(host(), feature("bad", broken("bad").load)))
    with pytest.raises(ConfigError, match=r"unknown option --bad-level.*broken and may have it: oarlock-bad \(ImportError: .*missing_part.*oarlock doctor"):
        resolve({"model": "m", "bad_level": 1})


# ---------------------------------------------------------------- changes
def change(*wanted: ConfigChange) -> Any:
    return lambda config, device: list(wanted)


def test_changes_are_applied_in_order_and_logged_with_their_reasons(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    first, second = ConfigChange("cache.block_size", 8, "it is small"), ConfigChange("cache.block_size", 32, "it is large")
    install(host(adjust_config=change(first)), with_hooks("extra", adjust_config=change(second)))
    with caplog.at_level(logging.WARNING, "oarlock.plugins"):
        config = prepare().config
    assert [r.getMessage() for r in caplog.records] == [
        "oarlock-host:host: --block-size is now 8 (was None), because it is small",
        "oarlock-extra:extra: --block-size is now 32 (was 8), because it is large",
    ]
    assert config.cache.block_size == 32


def test_a_hook_sees_the_configuration_that_was_typed_and_the_device(install: Any) -> None:
    seen: list[Any] = []

    def adjust(config: Any, device: Any) -> list[Any]:
        seen.append((device.name, "scheduler.max_num_seqs" in config.typed, config.scheduler.max_num_seqs))
        return []

    install(host(adjust_config=adjust))
    prepare(max_num_seqs=7)
    prepare()
    assert seen == [("host", True, 7), ("host", False, 256)]


def test_what_the_user_typed_may_not_be_changed(install: Any) -> None:
    install(host(adjust_config=change(ConfigChange("cache.block_size", 8, "its kernels know no other"))))
    with pytest.raises(PluginError) as caught:
        prepare(block_size=16)
    for word in ("--block-size 16 was given", "oarlock-host:host needs 8 on device host", "its kernels know no other", "leave --block-size out"):
        assert word in str(caught.value)
    assert prepare(block_size=8).config.cache.block_size == 8  # it asks for what was typed
    assert prepare().config.cache.block_size == 8


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (ConfigChange("model.max_model_len", 8, "x"), "model.max_model_len, which is settled"),
        (ConfigChange("device.device", "other", "x"), "device.device, which is settled"),
        (ConfigChange("device.options", {}, "x"), "device.options, which is settled"),
        (ConfigChange("cache.blocksize", 8, "x"), "cache.blocksize, which is no field"),
        (ConfigChange("typed", (), "x"), "typed, which is no field"),
        (ConfigChange("cache.block_size", "8", "x"), "block_size to '8', which it cannot hold"),
        (ConfigChange("cache.enable_prefix_caching", 1, "x"), "enable_prefix_caching to 1, which it cannot hold"),
        (ConfigChange("scheduler.policy", "random", "x"), "policy to 'random', which it cannot hold"),
        ("cache.block_size", "yielded str instead of ConfigChange"),
    ],
)
def test_an_impossible_change_names_the_plugin(install: Any, wanted: Any, words: str) -> None:
    install(host(adjust_config=change(wanted)))
    with pytest.raises(PluginError, match="plugin oarlock-host:host") as caught:
        prepare()
    assert words in str(caught.value)


def test_a_changed_configuration_may_not_contradict_itself(install: Any) -> None:
    install(host(adjust_config=change(ConfigChange("scheduler.max_num_batched_tokens", 16, "x"))))
    with pytest.raises(ConfigError, match="max-num-batched-tokens 16 is below --max-num-seqs 256"):
        prepare()


# ---------------------------------------------------------------- problems
def test_errors_end_the_start_and_warnings_are_logged(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = [Problem("warning", "it is slow", "be patient")]
    install(host(check_model=lambda model, config, device: found))
    with caplog.at_level(logging.WARNING, "oarlock.plugins"):
        prepare()
    assert [r.getMessage() for r in caplog.records] == ["it is slow; be patient (oarlock-host:host)"]
    found += [Problem("error", "heads are too wide", "take another model"), Problem("error", "and too many")]
    with pytest.raises(UnsupportedByBackend) as caught:
        prepare()
    assert str(caught.value) == (
        "m cannot be served on host: heads are too wide; take another model (oarlock-host:host). and too many (oarlock-host:host)"
    )


def test_the_model_is_checked_under_the_changed_configuration(install: Any) -> None:
    seen: list[Any] = []

    def check(model: Any, config: Any, device: Any) -> list[Any]:
        seen.append((model.architecture, config.cache.block_size, device.name))
        return []

    install(host(adjust_config=change(ConfigChange("cache.block_size", 8, "x")), check_model=check))
    prepare()
    assert seen == [("TestForCausalLM", 8, "host")]


def test_each_is_asked_once_and_only_of_those_who_take_part(install: Any) -> None:
    asked: list[str] = []

    def asks(name: str) -> dict[str, Any]:
        return {
            "adjust_config": lambda config, device: asked.append(f"{name} adjust") or [],
            "check_model": lambda model, config, device: asked.append(f"{name} check") or [],
        }

    install(host(**asks("host")), with_hooks("other", DEVICE_GROUP, **asks("other")), with_hooks("extra", **asks("extra")))
    prepare()
    assert sorted(asked) == ["extra adjust", "extra check", "host adjust", "host check"]


# ---------------------------------------------------------------- parts
def part(name: str, priority: int = 0, kind: Any = "model", factory: str = "json:dumps") -> Extension:
    return Extension(kind, name, factory, priority)


def brings(*made: Extension) -> dict[str, Any]:
    return {"extensions": lambda: list(made)}


def test_the_part_of_highest_priority_serves_and_a_tie_names_both(install: Any) -> None:
    install(host(), with_hooks("one", **brings(part("A"), part("B", 5))), with_hooks("two", **brings(part("B", 9), part("C"))))
    found = extensions.find("model", "B")
    assert found is not None and found.priority == 9
    assert extensions.find("model", "Z") is None
    assert extensions.find("executor", "A") is None
    with pytest.raises(PluginError, match="model C comes from oarlock-two and oarlock itself with equal priority 0"):
        extensions.find("model", "C", own=True)
    won = extensions.find("model", "B", own=True)
    assert won is not None and won.priority == 9


def test_a_part_of_another_devices_package_takes_no_part(install: Any) -> None:
    install(host(), with_hooks("other", DEVICE_GROUP, **brings(part("A"))))
    assert extensions.find("model", "A", "host") is None
    assert extensions.find("model", "A", "other") is not None
    assert extensions.find("model", "A") is not None


@pytest.mark.parametrize("factory", ["no_such_module_at_all", "json:no_such_name"])
def test_a_part_that_cannot_be_imported_is_named(factory: str) -> None:
    with pytest.raises(PluginError, match=f"model A: {factory} cannot be imported"):
        extensions.load(part("A", factory=factory))


@pytest.mark.parametrize("made", [part("A", kind="load_format"), part(""), part("A", factory=""), "A"])
def test_an_impossible_part_makes_the_plugin_broken(made: Any) -> None:
    (bad,) = catalogue(with_hooks("extra", **brings(made))).broken()
    assert "oarlock-extra" in bad.error


class MyExecutor:
    def __init__(self, *given: Any) -> None:
        self.given = given


def test_an_executor_is_chosen_by_its_name(install: Any) -> None:
    install(host(), with_hooks("extra", **brings(part("mine", kind="executor", factory=f"{__name__}:MyExecutor"))))
    config = resolve({"model": "m", "distributed_executor_backend": "mine"}).engine
    assert isinstance(make_executor(config, SUMMARY, "host", "m:D"), MyExecutor)
    with pytest.raises(ConfigError, match="--distributed-executor-backend other: choose from ray, mp, inline, mine"):
        resolve({"model": "m", "distributed_executor_backend": "other"})
    with pytest.raises(ConfigError, match="has no Ray executor; use mp"):
        resolve({"model": "m", "distributed_executor_backend": "ray"})


def greet(arguments: list[str]) -> int:
    print("hello", *arguments)
    return 3


def test_a_command_is_listed_and_run(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    greeting = Extension("command", "greet", f"{__name__}:greet", help="say hello")
    install(host(), with_hooks("extra", **brings(greeting, Extension("command", "serve", "no:no"))))
    assert main.main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert "  greet        say hello (oarlock-extra)" in main.usage() and main.usage().count("serve        ") == 1
    assert main.main(["gret"]) == 2
    assert "did you mean greet?" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_is_one_line(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(host(), with_hooks("extra", **brings(Extension("command", "greet", "no_such_module_at_all:f"))))
    assert main.main(["greet"]) == 1
    assert "command greet: no_such_module_at_all:f cannot be imported" in capsys.readouterr().err


# ---------------------------------------------------------------- observers
def step(tokens: int = 1) -> EngineOutputs:
    return EngineOutputs((EngineOutput("r", new_token_ids=(7,) * tokens),), SchedulerStats(num_running=1, num_blocks=8), 0.01)


class Observer:
    def __init__(self, fail: bool = False) -> None:
        self.batches: list[list[EngineOutputs]] = []
        self.threads: set[str] = set()
        self.closed = 0
        self.fail = fail

    def observe(self, steps: list[EngineOutputs]) -> None:
        self.threads.add(threading.current_thread().name)
        self.batches.append(steps)
        if self.fail:
            raise ValueError("observer is unwell")

    def close(self) -> None:
        self.closed += 1


def test_an_observer_gets_batches_on_a_thread_of_its_own() -> None:
    observer = Observer()
    feed = Feed({"o": observer})
    started = time.perf_counter()
    for _ in range(100):
        feed.put(step())
    assert time.perf_counter() - started < 0.1  # it is not waited for
    feed.close()
    feed.close()
    assert sum(map(len, observer.batches)) == 100 and len(observer.batches) <= 2
    assert observer.threads == {"oarlock-sinks"} and observer.closed == 1


def test_an_observer_that_fails_is_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oarlock.engine.sinks.EVERY_S", 0.01)
    bad, good = Observer(fail=True), Observer()
    feed = Feed({"bad": bad, "good": good})
    for _ in range(3):
        feed.put(step())
        time.sleep(0.05)
    feed.close()
    assert len(bad.batches) == 1 and sum(map(len, good.batches)) == 3
    assert "the sink bad failed and is no longer called: ValueError: observer is unwell" in caplog.text


def test_an_observer_that_hangs_loses_the_oldest_and_a_warning_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oarlock.engine.sinks.MAX_QUEUED", 5)
    observer = Observer()
    feed = Feed({"o": observer})
    for n in range(8):
        feed.put(step(n + 1))
    feed.close()
    seen = [len(s.outputs[0].new_token_ids) for batch in observer.batches for s in batch]
    assert seen == [4, 5, 6, 7, 8] and "3 steps were not shown" in caplog.text


def test_an_observer_that_asks_for_them_is_shown_the_requests_that_ended() -> None:
    class Records(Observer):
        def finished(self, records: list[Any]) -> None:
            self.batches.append(records)

    plain, records = Observer(), Records()
    feed = Feed({"plain": plain, "records": records})
    for n in range(3):
        feed.note(n)
    feed.close()
    assert plain.batches == [] and [n for batch in records.batches for n in batch] == [0, 1, 2]


def test_spans_need_a_package_that_sends_them(install: Any) -> None:
    install(host(), with_hooks("extra"))
    config = prepare().config
    asked = dataclasses.replace(config, observability=dataclasses.replace(config.observability, otlp_traces_endpoint="http://localhost:4318"))
    with pytest.raises(ConfigError, match=r"pip install \./plugins/otel"):
        make_feed(asked, "host")


MADE: list[Observer] = []


def make_observer(config: Any) -> Observer | None:
    if config.device.options["extra_depth"] == 3:
        return None
    MADE.append(Observer())
    return MADE[-1]


def make_unwell(config: Any) -> Observer:
    raise ValueError("--extra-depth is no address")


def test_a_sink_that_cannot_be_made_says_why_in_a_line(install: Any) -> None:
    sink = Extension("sink", "watch", f"{__name__}:make_unwell")
    install(host(), with_hooks("extra", options=lambda: [DEPTH], extensions=lambda: [sink]))
    with pytest.raises(PluginError, match="the sink watch of .* cannot be made: --extra-depth is no address"):
        make_feed(prepare().config, "host")


def test_a_sink_is_made_at_start_from_the_configuration_and_may_decline(install: Any) -> None:
    sink = Extension("sink", "watch", f"{__name__}:make_observer")
    install(host(), with_hooks("extra", options=lambda: [DEPTH], extensions=lambda: [sink]))
    assert make_feed(prepare().config, "host") is None
    MADE.clear()
    feed = make_feed(prepare(extra_depth=4).config, "host")
    assert feed is not None and len(MADE) == 1
    feed.put(step())
    feed.close()
    assert len(MADE[0].batches) == 1


def test_the_statistics_line_of_an_offline_engine(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oarlock.engine.sinks.STATS_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "oarlock.engine"):
        StatsLog().observe([step(3), step(4)])
    assert "tokens/s, running 1, waiting 0, KV cache 0.0 %" in caplog.text


def test_a_plugin_takes_part_when_it_works_and_its_device_was_chosen(install: Any) -> None:
    found = install(host(), with_hooks("other", DEVICE_GROUP), with_hooks("extra"))
    assert {p.name for p in found.plugins if p.serves("host")} == {"host", "extra"}
    names = {name for name, _ in worker_plugins("host", found).list_name_plugin()}
    assert names == {"oarlock-host:host", "oarlock-extra:extra"}


def test_a_hook_may_take_only_the_arguments_that_it_wants(install: Any) -> None:
    install(host(adjust_config=lambda device: [ConfigChange("cache.block_size", 8, device.name)]))
    assert prepare().config.cache.block_size == 8


def test_a_device_that_is_not_there_is_said_before_the_model_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_summary", lambda config: pytest.fail("that may be a download of minutes"))
    with pytest.raises(BackendNotFound, match="--device none-such"):
        launch.prepare(resolve({"model": "m", "device": "none-such"}).engine)
