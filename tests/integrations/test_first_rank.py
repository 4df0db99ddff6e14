from tests.integrations import first_rank


def test_ranks_with_differing_models(two_ranks):
    first_rank.check([rank["first_rank"] for rank in two_ranks])
