"""The dashboard of speculation: its gain, predicted and measured, and the reasons."""

from __future__ import annotations

from panel import G, Panel, bad_below, rate

SPECULATION = [
    Panel(
        "τ",
        "Mean tokens of a verified block: the accepted ones and one more. 1 is plain decoding. Where it falls: other "
        "text than the draft was trained on, or a draft that is not what it was (compare `spire eval acceptance`).",
        "short",
        {"{{instance}}": f"spire:tau:ratio1m{G}"},
        bad_below(1.3, 2),
        least=1,
    ),
    Panel(
        "Acceptance rate",
        "Of the draft tokens that were verified, those that stood. A deeper k lowers it without harm: judge the first "
        "position in the panel beside.",
        "percentunit",
        {"{{instance}}": f"spire:acceptance:ratio1m{G}"},
        most=1,
    ),
    Panel(
        "Acceptance by position",
        "Of the blocks that had a draft token at this position, the share in which it, and all before it, stood. The "
        "first is what the draft is worth; a steep fall says that k is too deep.",
        "percentunit",
        {"{{position}}": 'spire:acceptance_at:ratio1m{instance=~"$gateway",position=~"[0-7]"}'},
        bad_below(0.4, 0.6),
        most=1,
    ),
    Panel(
        "Draft tokens per second",
        "Verified and accepted. Between them lies work that was done for nothing.",
        "short",
        {"drafted": rate("spire_draft_tokens_total"), "accepted": rate("spire_accepted_tokens_total")},
    ),
    Panel(
        "Share of the output from drafts",
        "Of the generated tokens, those that the draft guessed: 1 − 1/τ where every block is drafted.",
        "percentunit",
        {"{{instance}}": f"spire:drafted_output:ratio1m{G}"},
        most=1,
    ),
    Panel(
        "k of rounds",
        "Rounds by the draft tokens of their deepest block. 0: plain, because speculation would lose, no draft is "
        "there, or a sample is taken.",
        "ops",
        {"{{k}}": f"{rate('spire_rounds_at_depth_total', by='k')} > 0"},
        stacked=True,
    ),
    Panel(
        "k chosen",
        "The depth that was chosen last for requests that leave it to the gateway.",
        "short",
        {"{{instance}}": f"spire_speculation_depth{G}"},
    ),
    Panel(
        "Multiplier",
        "Tokens a second with speculation over those without: measured against rounds that were left plain "
        "(--plain-share), beside what the performance model says of the same rounds (--calibration). Below 1 "
        "speculation loses: take a fixed --k away. Far below the model: something beside the models takes time, see "
        "the round's parts.",
        "short",
        {
            "measured {{instance}}": f"spire:multiplier_measured:ratio10m{G}",
            "modelled {{instance}}": f"spire:multiplier_modelled:mean10m{G}",
        },
        bad_below(1, 1.2),
    ),
    Panel(
        "Cost of a million tokens",
        "All devices by the hour (--price, --draft-price) over the tokens of all gateways; plain: what they would "
        "have cost without a draft, by the measured multiplier. Idle devices cost too: compare under load.",
        "short",
        {
            "with speculation": "spire:cost_per_million_tokens:rate5m",
            "plain": "spire:cost_per_million_tokens_plain:rate5m",
        },
    ),
]
