"""Configs: files load, mistakes are one clear line, overrides and round trips keep every value."""
import dataclasses
from pathlib import Path

import pytest

import config as configs
from config import Config, change

REPO = Path(configs.__file__).parent
FILES = sorted((REPO / "configs").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_config_file_loads(path):
    assert isinstance(configs.load(path), Config)


def test_command_line_overrides_file():
    c = configs.load(REPO / "configs/debug.py", ["--optim.lr", "0.5", "--model.attention", "reference",
                                                    "--wandb.tags", "a", "b"])
    assert (c.optim.lr, c.model.attention, c.wandb.tags) == (0.5, "reference", ("a", "b"))
    assert c.data == configs.load(REPO / "configs/debug.py").data


def test_json_round_trip(tmp_path):
    c = change(Config(), wandb=dict(tags=("a", "b")), model=dict(window=8, window_pattern="LS"))
    (tmp_path / "config.json").write_text(configs.to_json(c))
    assert configs.load(tmp_path) == c


def test_change_leaves_the_base_alone():
    base = Config()
    assert change(base, data=dict(seq_len=7)).data.seq_len == 7
    assert base == Config()


def test_unknown_field_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="no field of optim is called 'weight_decy'; nearest: weight_decay"):
        change(Config(), optim=dict(weight_decy=1e-3))
    with pytest.raises(ValueError, match="no config section is called 'modle'; nearest: model"):
        change(Config(), modle=dict())
    bad = tmp_path / "bad.py"
    bad.write_text("from config import Config, Model\nconfig = Config(model=Model(n_layers=3))\n")
    with pytest.raises(ValueError, match="'n_layers'; nearest: n_layer"):
        configs.load(bad)
    with pytest.raises(ValueError, match="Unrecognized options: --model.n-layr, 3 Perhaps you meant: --model.n-layer"):
        configs.load(REPO / "configs/debug.py", ["--model.n-layr", "3"])


@pytest.mark.parametrize("section, field, value, rule", [
    ("data", "seq_len", "2048", r"data\.seq_len='2048' must be int"),
    ("data", "seq_len", True, r"data\.seq_len=True must be int"),
    ("optim", "lr", None, r"optim\.lr=None must be float"),
    ("model", "mlp", "relu", r"model\.mlp='relu' must be one of 'gelu', 'swiglu'"),
    ("model", "attention", "flash", r"model\.attention='flash' must be one of 'auto', 'flash_attn2'"),
    ("wandb", "tags", ("a", 1), r"wandb\.tags=\('a', 1\) must be"),
])
def test_wrong_type_in_a_file(section, field, value, rule):
    with pytest.raises(ValueError, match=rule):
        configs.check_types(change(Config(), **{section: {field: value}}))


def test_int_is_a_float():
    configs.check_types(change(Config(), optim=dict(lr=1)))


def test_wrong_type_on_the_command_line():
    with pytest.raises(ValueError, match="--data.seq-len"):
        configs.load(REPO / "configs/debug.py", ["--data.seq-len", "long"])


def test_help_exits_0_and_knows_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        configs.load(REPO / "configs/debug.py", ["--help"])
    assert stop.value.code in (0, None) and "--optim.weight-decay" in capsys.readouterr().out


@pytest.mark.parametrize("change_by, rule", [
    (dict(model=dict(n_head=5)), "model.d_model=768 must be a multiple of model.n_head=5"),
    (dict(model=dict(n_kv_head=5)), "model.n_head=12 must be a multiple of model.n_kv_head=5"),
    (dict(model=dict(position="rope", d_model=36)), "even head width, not d_model / n_head = 3"),
    (dict(model=dict(window_pattern="LSX")), "model.window_pattern='LSX' must be letters L and S"),
    (dict(model=dict(window_pattern="LS")), "model.window=0 with model.window_pattern='LS': S layers need a window"),
    (dict(model=dict(window=64)), "model.window=64 with model.window_pattern='L'"),
    (dict(data=dict(seq_len=0)), "data.seq_len=0 must be positive"),
    (dict(data=dict(val_fraction=1.0)), "data.val_fraction=1.0 must lie between 0 and 1"),
    (dict(optim=dict(lr=0.0, min_lr=0.0)), "optim.lr=0.0 must be positive"),
    (dict(optim=dict(min_lr=1.0)), "optim.min_lr=1.0 must not exceed optim.lr=0.0006"),
    (dict(optim=dict(beta2=1.0)), "optim.beta2=1.0 must be below 1"),
    (dict(train=dict(max_steps=-1)), "train.max_steps=-1 must be a number >= 0"),
    (dict(train=dict(tokens_per_step=1000)), "train.tokens_per_step=1000 must be a multiple of data.batch"),
    (dict(optim=dict(lr=float("nan"))), "optim.lr=nan must be a number >= 0"),
    (dict(optim=dict(lr=float("inf"))), "optim.lr=inf must be a number >= 0"),
], ids=str)
def test_rules_between_fields(change_by, rule):
    with pytest.raises(ValueError) as error:
        configs.validate(change(Config(), **change_by))
    assert rule in str(error.value)


@pytest.mark.parametrize("text, rule", [
    ("x = 1", "must define `config`"),
    ("config = 3", "must define `config`, a config.Config; found int"),
    ("config = (", "line 1"),
    ("from config import Config\nconfig = Config(model=3)", "model must be a config.Model, not 3"),
    ("from configs.quikstart import config", "ModuleNotFoundError: No module named 'configs.quikstart'"),
    ("config = Confg()", "NameError: name 'Confg' is not defined"),
    ("x = 1 + 'a'", "unsupported operand type(s) for +: 'int' and 'str'"),
])
def test_a_file_that_is_no_config(tmp_path, text, rule):
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        configs.load(path)
    assert rule in str(error.value)


def test_missing_file_names_the_nearest_config():
    with pytest.raises(ValueError, match="no config file 'configs/quikstart.py'; nearest in configs/: quickstart.py"):
        configs.load("configs/quikstart.py")


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder: it has no config.json"):
        configs.load(tmp_path)


def test_a_damaged_config_json(tmp_path):
    (tmp_path / "config.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="config.json is damaged"):
        configs.load(tmp_path)


def test_every_field_has_a_type_that_is_checked():
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.type):
            with pytest.raises(ValueError, match=f"{section.name}.{field.name}="):
                configs.check_types(change(Config(), **{section.name: {field.name: object()}}))


def test_errors_are_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop, configs.one_line_errors():
        raise ValueError("two\nlines")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: two lines\n"


def test_our_own_bugs_keep_their_traceback():
    with pytest.raises(KeyError), configs.one_line_errors():
        raise KeyError("bug")
