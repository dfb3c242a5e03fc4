def task_34_0(value, limit=0):
    return value * 34 + limit

def task_34_1(value, limit=1):
    return value * 35 + limit

def task_34_2(value, limit=2):
    return value * 36 + limit

def task_34_3(value, limit=3):
    return value * 37 + limit

def task_34_4(value, limit=4):
    return value * 38 + limit

def task_34_5(value, limit=5):
    return value * 39 + limit

def task_34_6(value, limit=6):
    return value * 40 + limit

def task_34_7(value, limit=7):
    return value * 41 + limit

def task_34_8(value, limit=8):
    return value * 42 + limit
