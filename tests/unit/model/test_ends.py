"""Ends of texts: from tokenizer, files and template; stop strings that are special tokens."""

import pytest

from longtail.errors import RequestError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.types import SamplingParams
from support.tiny_models import tiny_tokenizer

TURN = "{% for m in messages %}<user>{{ m['content'] }}"


@pytest.mark.parametrize(
    ("template", "ids", "turn", "turn_id"),
    [
        (None, (1, 2), "", None),
        (f"{TURN}<eos>\n{{% endfor %}}", (1, 2), "<eos>", 1),
        (f"{TURN}\n<pad>\n{{% endfor %}}", (1, 2, 0), "<pad>", 0),  # listed nowhere
        (f"{TURN}<unk>\n{{% endfor %}}<eos>", (1, 2), "<unk>", 2),  # as Phi's: a turn, then a text
        (f"{TURN}<pad><eos>{{% endfor %}}", (1, 2), "<pad><eos>", 1),  # as Command's: two tokens
        (f"{TURN}\n\n{{% endfor %}}", (1, 2), "", None),
        ("{{ raise_exception('tools') }}", (1, 2), "", None),
        ("{{ messages[0]['content'] }}<eos>", (1, 2), "", None),  # it leaves answers out
    ],
)
def test_ends_are_those_of_the_files_and_of_the_template(template, ids, turn, turn_id):
    ends = Tokenizer(tiny_tokenizer(template)._inner, (1, 2, 999)).ends  # 999: no such token
    assert (ends.ids, ends.turn, ends.turn_id) == (ids, turn, turn_id)


def test_a_stop_string_that_is_a_special_token_stops_by_its_id():
    ends = tiny_tokenizer().ends
    assert ends.stopping(SamplingParams()).stop_token_ids == (1,)
    asked = SamplingParams(stop=("a", "<user>\n", "<us"))
    assert ends.stopping(asked).stop_token_ids == (1, 3)
    assert ends.stopping(asked).stop == asked.stop
    asked = SamplingParams(stop=("<pad>",), stop_token_ids=(7,))
    assert ends.stopping(asked).stop_token_ids == (7, 0)
    with pytest.raises(RequestError, match=r"stop = 'a<eos>': .* special token '<eos>'.* alone"):
        ends.stopping(SamplingParams(stop=("a<eos>",)))
